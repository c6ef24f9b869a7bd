"""Weights in 8 and 4 bits as the GPU kernels take them, and the same arithmetic in torch. Imports no triton."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class IntWeight(NamedTuple):
    """A weight [outputs, inputs] = (values - zeros) * scales, by group of neighbouring inputs of one output."""

    values: Tensor
    """8 bits: [outputs, inputs] int8. 4 bits: [outputs, inputs / 2] uint8; byte i of a group of G inputs holds input i
    in its lower half and input i + G / 2 in its upper one, so that a tile of bytes is two tiles of inputs."""
    scales: Tensor
    """[outputs, inputs / group] float32."""
    zeros: Tensor | None
    """4 bits: [outputs, inputs / group] uint8."""
    group: int
    """Inputs that share a scale."""

    @property
    def bits(self) -> int:
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (8 // self.bits)


class Fp8Weight(NamedTuple):
    """A weight [outputs, inputs] = values * scales[:, None]."""

    values: Tensor
    """[outputs, inputs] float8_e4m3fn."""
    scales: Tensor
    """[outputs] float32."""


def quantize_int8(weight: Tensor, group: int | None = None) -> IntWeight:
    """weight [outputs, inputs], symmetric, rounded to nearest. group: None is all inputs of an output."""
    group = group or weight.shape[1]
    grouped = _in_groups(weight.float(), group)
    scales = grouped.abs().amax(-1).clamp(min=1e-12) / 127.0
    values = (grouped / scales[..., None]).round().clamp(-127, 127).to(torch.int8)
    return IntWeight(values.flatten(1).contiguous(), scales.contiguous(), None, group)


def quantize_int4(weight: Tensor, group: int) -> IntWeight:
    """weight [outputs, inputs], from each group's smallest to its largest value (and 0), rounded to nearest."""
    grouped = _in_groups(weight.float(), group)
    low, high = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)
    scales = (high - low).clamp(min=1e-12) / 15.0
    zeros = (-low / scales).round().clamp(0, 15)
    values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    return IntWeight(pack_int4(values.flatten(1), group), scales.contiguous(), zeros.to(torch.uint8), group)


def pack_int4(values: Tensor, group: int) -> Tensor:
    """[outputs, inputs] uint8 below 16 -> [outputs, inputs / 2] uint8."""
    lower, upper = _in_groups(values, group).chunk(2, dim=-1)
    return (lower | (upper << 4)).flatten(1).contiguous()


def dequantized(weight: IntWeight) -> Tensor:
    """[outputs, inputs] float32."""
    if weight.zeros is None:
        grouped = _in_groups(weight.values.float(), weight.group)
        return (grouped * weight.scales[..., None]).flatten(1)
    packed = _in_groups(weight.values, weight.group // 2)
    values = torch.cat([packed & 15, packed >> 4], dim=-1).float()
    return ((values - weight.zeros.float()[..., None]) * weight.scales[..., None]).flatten(1)


def int_matmul(rows: Tensor, weight: IntWeight, bias: Tensor | None = None) -> Tensor:
    """rows [rows, inputs] -> [rows, outputs]"""
    product = rows.float() @ dequantized(weight).t()
    return (product if bias is None else product + bias.float()).to(rows.dtype)


def quantize_fp8(values: Tensor) -> Fp8Weight:
    """[rows, inputs], scaled by each row's largest magnitude: weights by output, activations by token."""
    scales = values.float().abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    scaled = (values.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX)
    return Fp8Weight(scaled.to(FP8), scales)


def fp8_matmul(rows: Fp8Weight, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """(values, scales) of rows and of a weight -> [rows, outputs]"""
    product = (rows.values.float() @ weight.values.float().t()) * rows.scales[:, None] * weight.scales[None, :]
    return (product if bias is None else product + bias.float()).to(dtype)


def _in_groups(values: Tensor, group: int) -> Tensor:
    """[outputs, inputs] -> [outputs, groups, group]"""
    return values.reshape(values.shape[0], -1, group)
