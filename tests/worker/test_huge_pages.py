import itertools

import pytest
import torch

from headrace_worker.huge_pages import ALIGNMENT, HUGE_PAGE, SLAB_BYTES, Arena, huge_zeros


@pytest.mark.parametrize("size", [10, HUGE_PAGE, 3 * HUGE_PAGE + 2])
def test_is_zero_writable_and_of_the_shape_asked_for(size: int) -> None:
    memory = huge_zeros((2, size), torch.bfloat16)
    assert memory.shape == (2, size)
    assert memory.dtype == torch.bfloat16
    assert not memory.any()
    memory[1, -1] = 3
    assert memory[1, -1] == 3
    assert memory.is_contiguous()


def test_an_arena_hands_out_parts_that_do_not_overlap() -> None:
    arena = Arena()
    sizes = [1, 100, SLAB_BYTES // 2, SLAB_BYTES // 2, SLAB_BYTES + 1, 7]
    parts = [arena.take(size, torch.uint8) for size in sizes]
    assert [part.numel() for part in parts] == sizes
    assert all(part.data_ptr() % ALIGNMENT == 0 for part in parts)
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel()) for part in parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_parts_outlive_their_arena() -> None:
    part = Arena().take(1000, torch.float32)
    part.fill_(1.0)
    assert part.sum() == 1000
