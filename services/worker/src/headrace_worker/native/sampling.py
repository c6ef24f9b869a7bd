"""Draws tokens at random, one a row, in one call: what `sampling.py` does with tensors otherwise."""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_worker.native.checks import check_tensor
from headrace_worker.native.library import Library, load


class Filters(NamedTuple):
    """Of each row: tensors [rows]."""

    temperatures: Tensor
    """float32, above 0."""
    top_k: Tensor
    """int64; 0 is no limit."""
    top_p: Tensor
    """float64."""
    min_p: Tensor
    """float32."""


def draw(scores: Tensor, filters: Filters, keys: Tensor, *, library: Library | None = None) -> Tensor:
    """scores [rows, vocab_size] float32, the greatest of each row finite; keys [rows] int64 -> token ids [rows] int64.
    ValueError for what the kernel does not take."""
    check_tensor("scores", scores, (None, None), (torch.float32,))
    num_rows, size = scores.shape
    if size < 1:
        raise ValueError("scores have no columns")
    for name, tensor, dtype in (
        ("temperatures", filters.temperatures, torch.float32),
        ("top_k", filters.top_k, torch.int64),
        ("top_p", filters.top_p, torch.float64),
        ("min_p", filters.min_p, torch.float32),
        ("keys", keys, torch.int64),
    ):
        check_tensor(name, tensor, (num_rows,), (dtype,))
    output = torch.empty(num_rows, dtype=torch.int64)
    (library or load()).functions.headrace_draw(
        scores.data_ptr(),
        num_rows,
        size,
        *(tensor.data_ptr() for tensor in filters),
        keys.data_ptr(),
        output.data_ptr(),
        1 if num_rows == 1 else torch.get_num_threads(),  # one row is one thread's: nobody else need be woken
    )
    return output
