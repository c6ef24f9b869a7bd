"""Memory in huge pages, where the system has them to give.

Weights and cache are read from end to end at every step; with pages of 4 KiB, address translation then costs a quarter
of the memory's bandwidth.
"""

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
SLAB_BYTES = 32 * HUGE_PAGE
ALIGNMENT = 64
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which the mmap module does not name."""


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Like torch.zeros on the CPU. Nothing is in memory before it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without huge pages: ordinary ones do.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    return raw[start : start + num_bytes].view(dtype).view(tuple(shape))


def release_pages(tensor: Tensor) -> None:
    """Zeroes a contiguous tensor on the CPU, and gives its memory back until it is written again. Its address stays."""
    page = mmap.PAGESIZE
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    first, last = -(-start // page) * page, end // page * page
    if first >= last or not _forget(first, last - first):
        tensor.zero_()
        return
    raw = tensor.view(-1).view(torch.uint8)
    raw[: first - start] = 0
    raw[last - start :] = 0


def bring_in(tensor: Tensor) -> bool:
    """Puts a contiguous tensor of `huge_zeros` into memory; what it holds stays. Other threads run meanwhile. False
    where the system cannot (before Linux 5.14), or has no memory left."""
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    start = tensor.data_ptr()
    first, last = start // page * page, -(-(start + tensor.numel() * tensor.element_size()) // page) * page
    return _advise(first, last - first, _POPULATE_WRITE)


def _forget(address: int, num_bytes: int) -> bool:
    """False where the system cannot."""
    return hasattr(mmap, "MADV_DONTNEED") and _advise(address, num_bytes, mmap.MADV_DONTNEED)


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(madvise(address, num_bytes, advice)) == 0


class Arena:
    """Many tensors in few pieces of memory, which live as long as one of the tensors does."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """[num_elements], zero."""
        num_bytes = num_elements * dtype.itemsize
        if self._used + num_bytes > self._slab.numel():
            self._slab = huge_zeros((max(num_bytes, SLAB_BYTES),), torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken
