"""y = x W^T with packed weights: bfloat16, or 8 or 4 bits."""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_worker.huge_pages import Arena, huge_zeros
from headrace_worker.native.checks import check_multiple, check_tensor
from headrace_worker.native.library import Library, load

TILE = 16
"""Outputs are packed in tiles of this many."""
INPUT_STEP = 32
"""The number of inputs must be a multiple of this, and this many share a scale."""


class WeightFormat(IntEnum):
    """As csrc/blocks.h numbers them. 8 bits: a scale for each group of inputs; 4 bits: a scale and a minimum."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


class PackedWeight:
    """A [outputs, inputs] matrix in the kernels' layout."""

    def __init__(self, data: Tensor, shape: tuple[int, int], format: WeightFormat, library: Library) -> None:
        """`data`: what one of the functions below has packed."""
        self.data = data
        self.num_outputs, self.num_inputs = shape
        self.format = format
        self.library = library

    def moved_to(self, arena: Arena) -> "PackedWeight":
        data = arena.take(self.data.numel(), torch.uint8)
        data.copy_(self.data.view(torch.uint8))
        return PackedWeight(data, (self.num_outputs, self.num_inputs), self.format, self.library)


def pack_weight(weight: Tensor, library: Library | None = None, arena: Arena | None = None) -> PackedWeight:
    """weight [outputs, inputs] bfloat16, as it is. Raises ValueError for what the kernels do not take."""
    check_tensor("weight", weight, (None, None), (torch.bfloat16,))
    packed = _room(weight.shape, WeightFormat.BF16, library, arena)
    packed.library.functions.headrace_pack(
        weight.data_ptr(), *weight.shape, packed.data.data_ptr(), torch.get_num_threads()
    )
    return packed


class Quantized(NamedTuple):
    weight: PackedWeight
    error: float
    """Root of the mean square of the errors, as a fraction of the weights' own."""


def quantize_weight(
    weight: Tensor, format: WeightFormat, library: Library | None = None, arena: Arena | None = None
) -> Quantized:
    """weight [outputs, inputs] float32, rounded to 8 or 4 bits. Raises ValueError for what the kernels do not take, and
    for numbers that are not finite: no code stands for them."""
    check_tensor("weight", weight, (None, None), (torch.float32,))
    packed = _room(weight.shape, format, library, arena)
    error = packed.library.functions.headrace_quantize(
        weight.data_ptr(), *weight.shape, format, packed.data.data_ptr(), torch.get_num_threads()
    )
    if not math.isfinite(error):
        raise ValueError("weight has numbers that are not finite")
    return Quantized(packed, error)


def packed_linear(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """rows [rows, inputs] bfloat16 -> [rows, outputs] bfloat16, summed in float32. A row's result is the same bits
    whatever the other rows are, and how many. Raises ValueError for what the kernel does not take."""
    check_tensor("rows", rows, (None, weight.num_inputs), (torch.bfloat16,))
    if bias is not None:
        check_tensor("bias", bias, (weight.num_outputs,), (torch.bfloat16,))
    output = rows.new_empty((rows.shape[0], weight.num_outputs))
    weight.library.functions.headrace_linear(
        rows.data_ptr(),
        rows.shape[0],
        weight.num_inputs,
        weight.data.data_ptr(),
        weight.format,
        weight.num_outputs,
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        torch.get_num_threads(),
    )
    return output


def _room(shape: torch.Size, format: WeightFormat, library: Library | None, arena: Arena | None) -> PackedWeight:
    num_outputs, num_inputs = shape
    check_multiple("number of inputs", num_inputs, INPUT_STEP)
    if num_outputs < 1:
        raise ValueError("weight has no outputs")
    kernels = library or load()
    num_blocks = -(-num_outputs // TILE) * (num_inputs // INPUT_STEP)
    size = num_blocks * int(kernels.functions.headrace_block_bytes(format))
    data = arena.take(size, torch.uint8) if arena else huge_zeros((size,), torch.uint8)
    return PackedWeight(data, (num_outputs, num_inputs), format, kernels)
