"""Causal attention of a mixed batch (single queries and chunks) that reads keys and values in their pages."""

import ctypes
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.native.checks import ELEMENT_TYPES, check_multiple, check_tensor
from headrace_worker.native.library import Library, load
from headrace_worker.native.structures import AttentionShape, Sequences

HEAD_DIM_STEP = 32
"""The size of a head must be a multiple of this."""


class PagedBatch:
    """Where each sequence's queries and cached positions are. Checked once, used in every layer."""

    def __init__(
        self,
        query_starts: NDArray[np.int32],
        context_lengths: NDArray[np.int32],
        block_table: NDArray[np.int32],
        *,
        block_size: int,
    ) -> None:
        """query_starts [sequences + 1]: first row of each sequence's queries, then the number of rows; context_lengths
        [sequences]: positions up to and with the last query; block_table [sequences, blocks]. Raises ValueError."""
        count = context_lengths.shape[0]
        _check_array("query_starts", query_starts, (count + 1,))
        _check_array("context_lengths", context_lengths, (count,))
        _check_array("block_table", block_table, (count, *block_table.shape[1:2]))
        lengths = np.diff(query_starts)
        if count < 1 or query_starts[0] != 0 or lengths.min() < 1:
            raise ValueError("query_starts does not begin with 0 and increase")
        if (context_lengths < lengths).any():
            raise ValueError("a sequence has more queries than positions")
        if context_lengths.max() > block_table.shape[1] * block_size:
            raise ValueError("the block table is too short for a sequence")
        used = block_table[np.arange(block_table.shape[1]) * block_size < context_lengths[:, None]]
        if used.min() < 0:
            raise ValueError("a block id is negative")
        self.block_size = block_size
        self.num_rows = int(query_starts[-1])
        self.greatest_block = int(used.max())
        self._kept = (query_starts, context_lengths, block_table)
        self.sequences = Sequences(
            count,
            query_starts.ctypes.data,
            context_lengths.ctypes.data,
            block_table.ctypes.data,
            block_table.shape[1],
        )


def _check_array(name: str, array: NDArray[np.int32], shape: tuple[int, ...]) -> None:
    if array.dtype != np.int32 or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"{name} is not a contiguous int32 array of the shape {list(shape)}")


def paged_attention(
    queries: Tensor, pages: Tensor, batch: PagedBatch, *, scale: float | None = None, library: Library | None = None
) -> Tensor:
    """queries [rows, num_heads, head_dim], pages [blocks, 2, num_kv_heads, block_size, head_dim] of the same type
    (float32 or bfloat16; values as in `reference.values_paired`) -> [rows, num_heads, head_dim]. The batch's own keys
    and values must be in the pages already.

    A query's result is the same bits whatever else is in the batch and however its sequence is cut into chunks. Raises
    ValueError for what the kernel does not take.
    """
    check_tensor("queries", queries, (batch.num_rows, None, None), ELEMENT_TYPES, row_stride=True)
    num_heads, head_dim = queries.shape[1:]
    check_tensor("pages", pages, (None, 2, None, batch.block_size, head_dim), (queries.dtype,))
    num_kv_heads = pages.shape[2]
    check_multiple("head size", head_dim, HEAD_DIM_STEP)
    check_multiple("number of heads", num_heads, num_kv_heads)
    if batch.greatest_block >= pages.shape[0]:
        raise ValueError(f"block {batch.greatest_block} is beyond the cache's {pages.shape[0]}")
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, batch.block_size, scale or 1.0 / math.sqrt(head_dim))
    output = torch.empty(queries.shape, dtype=queries.dtype)
    (library or load()).functions.headrace_attention(
        ctypes.byref(shape),
        ctypes.byref(batch.sequences),
        queries.data_ptr(),
        queries.stride(0),
        pages.data_ptr(),
        output.data_ptr(),
        int(queries.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return output
