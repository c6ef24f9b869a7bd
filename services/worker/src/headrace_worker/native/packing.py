"""The decoder's matrices in the kernels' layout: in bfloat16, or in 8 or 4 bits."""

from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.huge_pages import Arena
from headrace_worker.models.decoder_weights import Packing
from headrace_worker.models.weight_bytes import WeightBits
from headrace_worker.native.library import Library
from headrace_worker.native.linear import INPUT_STEP, PackedWeight, WeightFormat, quantize_weight
from headrace_worker.native.model import NativeMatrix, by_turns, pack, pack_gate_up, with_bias

LOSSLESS = 2.0**-10
"""Relative error up to which 4 bits are what the weights had anyway: less than bfloat16 itself takes away."""


class Quantization(StrEnum):
    NONE = "none"
    AUTO = "auto"
    """What a quantized file has: 4 bits where they lose nothing, else 8."""
    INT8 = "int8"
    INT4 = "int4"


class NativePacking(Packing[NativeMatrix], Protocol):
    @property
    def dtype(self) -> torch.dtype:
        """In which weights are to come."""
        ...


class Bfloat16Packing:
    folds_norms = True
    dtype = torch.bfloat16

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return pack(weight.contiguous(), bias, self._kernels, self._arena)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return pack_gate_up(weight.contiguous(), bias, self._kernels, self._arena)


class QuantizedPacking:
    folds_norms = False
    """Groups of inputs share a scale, so their weights had better be of one size."""
    dtype = torch.float32
    """Rounded once, and weights that were quantized before are found to be."""

    def __init__(self, kernels: Library, quantization: Quantization, vocab_size: int) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self._vocab_size = vocab_size
        self._arena = Arena()

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return with_bias(self._packed(weight.contiguous()), None if bias is None else bias.bfloat16())

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return self.linear(by_turns(weight), None if bias is None else by_turns(bias))._replace(step=2)

    def _packed(self, weight: Tensor) -> PackedWeight:
        try:
            return self._quantized(weight)
        except ValueError as error:
            raise ConfigError("quantization", f"a matrix cannot be rounded to few bits: {error}") from error

    def _quantized(self, weight: Tensor) -> PackedWeight:
        if self._quantization is Quantization.AUTO:
            exact, error = quantize_weight(weight, WeightFormat.INT4, self._kernels)
            if error <= LOSSLESS:
                return exact.moved_to(self._arena)
            return quantize_weight(weight, WeightFormat.INT8, self._kernels, self._arena).weight
        # The head decides between tokens: what 4 bits lose there cannot be made good by a later layer.
        is_fine = self._quantization is Quantization.INT8 or weight.shape[0] == self._vocab_size
        format = WeightFormat.INT8 if is_fine else WeightFormat.INT4
        return quantize_weight(weight, format, self._kernels, self._arena).weight


def weight_bits(quantization: Quantization, vocab_size: int) -> WeightBits | None:
    """At most: AUTO may do with 4 bits. None: the weights stay as they are."""
    if quantization is Quantization.NONE:
        return None
    eight, four = 8 + 16 / INPUT_STEP, 4 + 2 * 16 / INPUT_STEP

    def bits(num_outputs: int, num_inputs: int) -> float:
        return four if quantization is Quantization.INT4 and num_outputs != vocab_size else eight

    return bits


def make_packing(kernels: Library, quantization: Quantization, vocab_size: int) -> NativePacking:
    if quantization is Quantization.NONE:
        return Bfloat16Packing(kernels)
    return QuantizedPacking(kernels, quantization, vocab_size)
