import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_worker.native import reference
from headrace_worker.native.attention import PagedBatch, paged_attention
from headrace_worker.native.library import Library
from tests.worker.native_variants import VARIANTS, library


@pytest.fixture(params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


class Case(NamedTuple):
    queries: Tensor
    pages: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_table: Tensor

    @property
    def batch(self) -> PagedBatch:
        return PagedBatch(
            self.query_starts.numpy(),
            self.context_lengths.numpy(),
            self.block_table.numpy(),
            block_size=self.pages.shape[3],
        )

    @property
    def pages_of_kernels(self) -> Tensor:
        return reference.values_paired(self.pages)

    def of(self, sequence: int) -> "Case":
        """The same sequence alone."""
        first, last = self.query_starts[sequence : sequence + 2].tolist()
        return Case(
            self.queries[first:last],
            self.pages,
            torch.tensor([0, last - first], dtype=torch.int32),
            self.context_lengths[sequence : sequence + 1],
            self.block_table[sequence : sequence + 1],
        )


def make_case(
    num_queries: Sequence[int],
    context_lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Blocks lie scattered, and whatever no sequence has written is NaN."""
    generator = torch.Generator().manual_seed(sum(context_lengths))
    num_heads, num_kv_heads = heads
    counts = [-(-length // block_size) for length in context_lengths]
    scattered = torch.randperm(sum(counts) + 3, generator=generator, dtype=torch.int32)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    pages = torch.full((len(scattered), 2, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    used = 0
    for sequence, (count, length) in enumerate(zip(counts, context_lengths, strict=True)):
        table[sequence, :count] = scattered[used : used + count]
        used += count
        written = torch.randn(count, 2, num_kv_heads, block_size, head_dim, generator=generator).to(dtype)
        if length % block_size:
            written[-1, :, :, length % block_size :] = math.nan
        pages[table[sequence, :count].long()] = written
    starts = torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32)
    queries = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator).to(dtype)
    return Case(queries, pages, starts, torch.tensor(context_lengths, dtype=torch.int32), table)


BATCHES = {
    "first token": ([1], [1]),
    "one long sequence": ([1], [4096]),
    "single queries": ([1, 1, 1, 1], [1, 70, 1000, 64]),
    "ragged mix": ([1, 37, 200, 3], [300, 37, 260, 1200]),
    "many single queries": ([1] * 24, [1, 16, 17, 255, 256, 257, 300, 520, *range(40, 56)]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((4, 4), 96, 8), ((8, 1), 128, 32), ((4, 2), 256, 16), ((40, 2), 64, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(
    kernels: Library, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int, batch: str
) -> None:
    case = make_case(*BATCHES[batch], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    output = paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels)
    exact = reference.paged_attention(case.queries.float(), case.pages.float(), *case[2:])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((5, 5), 64), ((16, 8), 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_the_batch(
    kernels: Library, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    queries, lengths = [1, 60, 1, 1, 16, *[1] * 20], [1000, 60, 300, 5, 700, *[400] * 20]
    case = make_case(queries, lengths, heads=heads, head_dim=head_dim, dtype=dtype)
    together = paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels)
    starts = case.query_starts.tolist()
    for sequence in range(6):
        alone = case.of(sequence)
        output = paged_attention(alone.queries, alone.pages_of_kernels, alone.batch, library=kernels)
        assert torch.equal(output, together[starts[sequence] : starts[sequence + 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_depend_on_how_the_prompt_is_cut(kernels: Library, dtype: torch.dtype) -> None:
    case = make_case([600], [600], dtype=dtype)
    whole = paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels)
    for first, last in ((0, 1), (5, 6), (13, 120), (250, 270), (599, 600)):
        batch = PagedBatch(
            np.array([0, last - first], dtype=np.int32),
            np.array([last], dtype=np.int32),
            case.block_table.numpy(),
            block_size=16,
        )
        piece = paged_attention(case.queries[first:last], case.pages_of_kernels, batch, library=kernels)
        assert torch.equal(piece, whole[first:last])


def test_the_number_of_threads_changes_nothing(kernels: Library) -> None:
    case = make_case([1, 30], [1300, 700])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels)
        torch.set_num_threads(3)
        assert torch.equal(paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels), alone)
    finally:
        torch.set_num_threads(threads)


def test_queries_may_be_a_part_of_wider_rows(kernels: Library) -> None:
    case = make_case([1, 5], [20, 30])
    wide = torch.cat([case.queries, torch.full((6, 6, 64), math.nan, dtype=torch.bfloat16)], dim=1)
    output = paged_attention(wide[:, :9], case.pages_of_kernels, case.batch, library=kernels)
    assert torch.equal(output, paged_attention(case.queries, case.pages_of_kernels, case.batch, library=kernels))


def test_refuses_what_it_cannot_compute() -> None:
    kernels = library("native")
    case = make_case([1, 5], [20, 30])
    batch = case.batch
    with pytest.raises(ValueError, match="queries has the shape"):
        paged_attention(case.queries[:5], case.pages, batch, library=kernels)
    with pytest.raises(ValueError, match=r"pages is torch\.bfloat16"):
        paged_attention(case.queries.float(), case.pages, batch, library=kernels)
    with pytest.raises(ValueError, match=r"queries is torch\.float16"):
        paged_attention(case.queries.half(), case.pages, batch, library=kernels)
    with pytest.raises(ValueError, match="number of heads is 8, not a positive multiple of 3"):
        paged_attention(case.queries[:, :8].contiguous(), case.pages, batch, library=kernels)
    with pytest.raises(ValueError, match="beyond the cache's 1"):
        paged_attention(case.queries, case.pages[:1], batch, library=kernels)
    small = make_case([1], [3], head_dim=48)
    with pytest.raises(ValueError, match="head size is 48"):
        paged_attention(small.queries, small.pages, small.batch, library=kernels)


@pytest.mark.parametrize(
    ("starts", "lengths", "table", "message"),
    [
        ([0, 1, 1], [5, 5], [[0], [1]], "does not begin with 0 and increase"),
        ([1, 2], [5], [[0]], "does not begin with 0 and increase"),
        ([0, 6], [5], [[0]], "more queries than positions"),
        ([0, 1], [17], [[0]], "too short"),
        ([0, 1], [5], [[-1]], "negative"),
    ],
)
def test_refuses_a_batch_that_makes_no_sense(
    starts: list[int], lengths: list[int], table: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PagedBatch(
            np.array(starts, dtype=np.int32),
            np.array(lengths, dtype=np.int32),
            np.array(table, dtype=np.int32),
            block_size=16,
        )


def test_refuses_a_batch_of_another_type() -> None:
    starts, table = np.array([0, 1], dtype=np.int32), np.array([[0]], dtype=np.int32)
    with pytest.raises(ValueError, match=r"context_lengths is not a contiguous int32 array of the shape \[1\]"):
        PagedBatch(starts, np.array([1], dtype=np.int64), table, block_size=16)
