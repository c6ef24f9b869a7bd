"""The prefill kernel against the plain formula."""

import math

import pytest
import torch
from torch import Tensor

from headrace_worker.kernels.attention_plan import plan_prefill
from headrace_worker.kernels.attention_prefill import attend, queries_per_piece
from headrace_worker.kernels.attention_tiles import Tile, prefill_tile
from tests.worker.kernels.attention_batch import FP8, Batch, Shape, make_batch

MIXED = [(5, 5), (40, 7), (33, 33), (50, 1)]
"""Whole prompts, later chunks, a single query."""


def run(
    batch: Batch,
    *,
    window: int | None = None,
    softcap: float | None = None,
    first_sequence: int = 0,
    tile: Tile | None = None,
) -> Tensor:
    num_tokens, num_heads, head_dim = batch.queries.shape
    num_sequences = batch.context_lengths.shape[0]
    per_piece = queries_per_piece(num_heads, batch.pages.shape[2], head_dim, batch.pages, tile)
    most = num_tokens // per_piece + num_sequences
    pieces = torch.empty((1 + most, 2), dtype=torch.int32, device=batch.queries.device)
    plan_prefill(
        batch.query_starts, pieces, first_sequence=first_sequence, queries_per_piece=per_piece, max_sequences=8
    )
    output = torch.full(batch.queries.shape, torch.nan, dtype=batch.queries.dtype, device=batch.queries.device)
    attend(
        batch.queries,
        batch.pages,
        batch.block_table,
        batch.query_starts,
        batch.context_lengths,
        pieces,
        output,
        num_pieces=most,
        scale=scale_of(batch),
        window=window,
        softcap=softcap,
        kv_scales=batch.kv_scales,
        tile=tile,
    )
    return output


def scale_of(batch: Batch) -> float:
    return 1.0 / math.sqrt(batch.queries.shape[2])


def check(batch: Batch, *, window: int | None = None, softcap: float | None = None, tile: Tile | None = None) -> None:
    result = run(batch, window=window, softcap=softcap, tile=tile).double()
    expected = batch.expected(scale=scale_of(batch), window=window, softcap=softcap)
    torch.testing.assert_close(result, expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(
    "shape",
    [Shape(4, 2, 64), Shape(7, 1, 80), Shape(3, 3, 96), Shape(4, 1, 128, 32), Shape(2, 1, 256, 8), Shape(17, 1, 16)],
    ids=str,
)
def test_every_shape_equals_the_plain_formula(shape: Shape, device: torch.device) -> None:
    check(make_batch(shape, MIXED, device))


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_window_hides_what_is_older(window: int, device: torch.device) -> None:
    check(make_batch(Shape(4, 2, 32), MIXED, device), window=window)


def test_scores_are_capped(device: torch.device) -> None:
    batch = make_batch(Shape(4, 2, 32), MIXED, device)
    check(batch, softcap=0.5)
    check(batch, softcap=0.5, window=9)


@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(3, 1, 80)], ids=str)
def test_keys_and_values_may_have_8_bits(shape: Shape, device: torch.device) -> None:
    batch = make_batch(shape, MIXED, device, kv_dtype=FP8)
    check(batch)
    check(batch, window=11)


@pytest.mark.parametrize("capability", [80, 90])
def test_tiles_of_a_gpu_compute_the_same(capability: int, device: torch.device) -> None:
    batch = make_batch(Shape(4, 1, 128), [(330, 40), (90, 3)], device)
    check(batch, tile=prefill_tile(128, False, capability))
    check(batch, window=140, tile=prefill_tile(128, False, capability))
    batch = make_batch(Shape(3, 1, 256), [(80, 30)], device, kv_dtype=FP8)
    check(batch, tile=prefill_tile(256, True, capability))


def test_a_row_of_no_sequence_gets_zeros(device: torch.device) -> None:
    batch = make_batch(Shape(2, 1, 32), [(20, 1), (1, 1), (9, 3)], device)
    batch.context_lengths[1] = 0
    result = run(batch)
    assert not result[1].any()
    assert result.isfinite().all()


def test_sequences_before_the_first_are_left_alone(device: torch.device) -> None:
    batch = make_batch(Shape(2, 1, 32), [(9, 1), (30, 1), (20, 6), (8, 8)], device)
    result = run(batch, first_sequence=2)
    assert result[:2].isnan().all()
    expected = batch.expected(scale=scale_of(batch))[2:]
    torch.testing.assert_close(result[2:].double(), expected, rtol=3e-3, atol=3e-3)


def test_a_query_gets_the_same_bits_whatever_chunk_it_came_in_and_whoever_is_beside_it(device: torch.device) -> None:
    shape = Shape(4, 2, 32)
    alone = make_batch(shape, [(75, 75)], device)
    whole = run(alone, window=30)
    for first, last in ((0, 20), (20, 43), (43, 74), (74, 75)):
        chunk = alone._replace(
            queries=alone.queries[first:last],
            query_starts=torch.tensor([0, last - first], dtype=torch.int32, device=device),
            context_lengths=torch.tensor([last], dtype=torch.int32, device=device),
        )
        assert torch.equal(run(chunk, window=30), whole[first:last])
    beside = make_batch(shape, [(75, 75), (50, 3), (8, 8)], device)
    alike = alone._replace(pages=beside.pages, block_table=beside.block_table[:1], queries=beside.queries[:75])
    assert torch.equal(run(beside, window=30)[:75], run(alike, window=30))


def test_nothing_else_is_taken(device: torch.device) -> None:
    batch = make_batch(Shape(4, 2, 32), [(5, 5)], device)
    pieces = torch.zeros((3, 2), dtype=torch.int32, device=device)
    output = torch.empty(batch.queries.shape, dtype=batch.queries.dtype, device=device)

    def attempt(changed: Batch, window: int | None = None, num_pieces: int = 1, scale: float = 1.0) -> None:
        attend(
            changed.queries,
            changed.pages,
            changed.block_table,
            changed.query_starts,
            changed.context_lengths,
            pieces,
            output,
            num_pieces=num_pieces,
            scale=scale,
            window=window,
            kv_scales=changed.kv_scales,
        )

    for wrong in (
        batch._replace(queries=batch.queries.bfloat16()),
        batch._replace(queries=batch.queries[:, :3]),
        batch._replace(queries=batch.queries.transpose(1, 2)),
        batch._replace(pages=batch.pages.to(FP8)),
        batch._replace(kv_scales=torch.ones((2, 2), device=device)),
        batch._replace(block_table=batch.block_table.long()),
        batch._replace(context_lengths=batch.context_lengths[:0]),
        batch._replace(query_starts=batch.query_starts[:1]),
    ):
        with pytest.raises(ValueError):
            attempt(wrong)
    for arguments in ({"window": 0}, {"num_pieces": 3}, {"scale": 0.0}, {"scale": math.inf}):
        with pytest.raises(ValueError):
            attempt(batch, **arguments)
