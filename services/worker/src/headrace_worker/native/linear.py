"""y = x W^T with packed bfloat16 weights."""

import torch
from torch import Tensor

from headrace_worker.huge_pages import Arena, huge_zeros
from headrace_worker.native.checks import check_multiple, check_tensor
from headrace_worker.native.library import Library, load

TILE = 16
"""Outputs are packed in tiles of this many."""
INPUT_STEP = 32
"""The number of inputs must be a multiple of this."""


class PackedWeight:
    """A [outputs, inputs] matrix in the kernels' layout. Reads no more of it afterwards."""

    def __init__(self, weight: Tensor, library: Library | None = None, arena: Arena | None = None) -> None:
        check_tensor("weight", weight, (None, None), (torch.bfloat16,))
        self.num_outputs, self.num_inputs = weight.shape
        check_multiple("number of inputs", self.num_inputs, INPUT_STEP)
        if self.num_outputs < 1:
            raise ValueError("weight has no outputs")
        self.library = library or load()
        num_tiles = -(-self.num_outputs // TILE)
        size = num_tiles * TILE * self.num_inputs
        self.data = arena.take(size, torch.bfloat16) if arena else huge_zeros((size,), torch.bfloat16)
        self.library.functions.headrace_pack(weight.data_ptr(), self.num_outputs, self.num_inputs, self.data.data_ptr())


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
        weight.num_outputs,
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        torch.get_num_threads(),
    )
    return output
