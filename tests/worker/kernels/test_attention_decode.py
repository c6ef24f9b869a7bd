"""The decode kernel against the plain formula."""

import math

import pytest
import torch
from torch import Tensor

from headrace_worker.kernels.attention_decode import DecodeWork, attend
from headrace_worker.kernels.attention_plan import plan_decode
from headrace_worker.kernels.attention_tiles import Tile, decode_tile
from tests.worker.kernels.attention_batch import FP8, Batch, Shape, make_batch

LENGTHS = [1, 16, 15, 33, 300, 5]
"""The one of 300 positions makes two pieces."""


def make_work(batch: Batch, num_pieces: int) -> DecodeWork:
    num_rows, num_heads, head_dim = batch.queries.shape
    at = batch.queries.device
    return DecodeWork(
        pieces=torch.full((num_pieces, 4), 1 << 30, dtype=torch.int32, device=at),
        first_pieces=torch.full((num_rows + 1,), 1 << 30, dtype=torch.int32, device=at),
        partials=torch.full((num_pieces, num_heads, head_dim), torch.nan, device=at),
        statistics=torch.full((num_pieces, num_heads, 2), torch.nan, device=at),
    )


def run(
    batch: Batch,
    *,
    num_wanted: int = 6,
    fixed_split: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    num_programs: int = 64,
    tile: Tile | None = None,
) -> Tensor:
    work = make_work(batch, num_wanted + batch.queries.shape[0])
    plan_decode(
        batch.context_lengths,
        work.pieces,
        work.first_pieces,
        num_wanted=num_wanted,
        max_rows=8,
        window=window,
        fixed_split=fixed_split,
    )
    output = torch.full(batch.queries.shape, torch.nan, dtype=batch.queries.dtype, device=batch.queries.device)
    attend(
        batch.queries,
        batch.pages,
        batch.block_table,
        work,
        output,
        num_programs=num_programs,
        scale=scale_of(batch),
        softcap=softcap,
        kv_scales=batch.kv_scales,
        tile=tile,
    )
    return output


def scale_of(batch: Batch) -> float:
    return 1.0 / math.sqrt(batch.queries.shape[2])


def decoding(shape: Shape, lengths: list[int], device: torch.device, kv_dtype: torch.dtype | None = None) -> Batch:
    return make_batch(shape, [(length, 1) for length in lengths], device, kv_dtype=kv_dtype)


def check(batch: Batch, result: Tensor, *, window: int | None = None, softcap: float | None = None) -> None:
    expected = batch.expected(scale=scale_of(batch), window=window, softcap=softcap)
    torch.testing.assert_close(result.double(), expected, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(
    "shape",
    [Shape(4, 2, 64), Shape(7, 1, 80), Shape(3, 3, 96), Shape(4, 1, 128, 32), Shape(2, 1, 256, 8), Shape(17, 1, 16)],
    ids=str,
)
def test_every_shape_equals_the_plain_formula(shape: Shape, device: torch.device) -> None:
    batch = decoding(shape, LENGTHS, device)
    check(batch, run(batch))


@pytest.mark.parametrize("window", [1, 7, 16, 300])
def test_a_window_hides_what_is_older(window: int, device: torch.device) -> None:
    batch = decoding(Shape(4, 2, 32), LENGTHS, device)
    check(batch, run(batch, window=window), window=window)


def test_scores_are_capped(device: torch.device) -> None:
    batch = decoding(Shape(4, 2, 32), LENGTHS, device)
    check(batch, run(batch, softcap=0.5), softcap=0.5)


@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(3, 1, 80)], ids=str)
def test_keys_and_values_may_have_8_bits(shape: Shape, device: torch.device) -> None:
    batch = decoding(shape, LENGTHS, device, FP8)
    check(batch, run(batch))


@pytest.mark.parametrize("capability", [80, 90])
def test_tiles_of_a_gpu_compute_the_same(capability: int, device: torch.device) -> None:
    batch = decoding(Shape(4, 1, 128), [300, 70, 3], device)
    check(batch, run(batch, tile=decode_tile(128, 4, False, capability)))
    batch = decoding(Shape(3, 1, 256), [65], device, FP8)
    check(batch, run(batch, tile=decode_tile(256, 3, True, capability)))


def test_few_programs_do_all_pieces(device: torch.device) -> None:
    batch = decoding(Shape(2, 1, 32), LENGTHS, device)
    result = run(batch)
    assert torch.equal(run(batch, num_programs=2), result)
    check(batch, result)


def test_a_row_of_no_sequence_gets_zeros(device: torch.device) -> None:
    batch = decoding(Shape(2, 1, 32), [20, 1, 9], device)
    batch.context_lengths[1] = 0
    result = run(batch)
    assert not result[1].any()
    expected = batch.expected(scale=scale_of(batch))
    torch.testing.assert_close(result[::2].double(), expected[::2], rtol=3e-3, atol=3e-3)


def test_with_fixed_splits_a_sequence_gets_the_same_bits_whoever_is_beside_it(device: torch.device) -> None:
    batch = decoding(Shape(2, 1, 32), [300, 3, 32, 16], device)
    together = run(batch, fixed_split=16, num_wanted=20)
    check(batch, together)
    for row in range(4):
        rows = slice(row, row + 1)
        alone = batch._replace(
            queries=batch.queries[rows],
            block_table=batch.block_table[rows],
            context_lengths=batch.context_lengths[rows],
        )
        assert torch.equal(run(alone, fixed_split=16, num_wanted=20), together[rows])


def test_nothing_else_is_taken(device: torch.device) -> None:
    batch = decoding(Shape(4, 2, 32), [5, 6], device)
    work = make_work(batch, 8)

    def attempt(changed: Batch, work: DecodeWork = work, num_programs: int = 1, softcap: float | None = None) -> None:
        output = torch.empty(changed.queries.shape, dtype=changed.queries.dtype, device=device)
        attend(
            changed.queries,
            changed.pages,
            changed.block_table,
            work,
            output,
            num_programs=num_programs,
            scale=1.0,
            softcap=softcap,
            kv_scales=changed.kv_scales,
        )

    for wrong in (
        batch._replace(queries=batch.queries.bfloat16()),
        batch._replace(queries=batch.queries[:, :3]),
        batch._replace(queries=batch.queries[:1]),
        batch._replace(pages=batch.pages[..., :16]),
        batch._replace(block_table=batch.block_table[:1]),
        batch._replace(kv_scales=torch.ones((2, 2), device=device)),
    ):
        with pytest.raises(ValueError):
            attempt(wrong)
    for wrong_work in (
        work._replace(pieces=work.pieces.long()),
        work._replace(first_pieces=work.first_pieces[:2]),
        work._replace(partials=work.partials[:4]),
        work._replace(statistics=work.statistics.double()),
    ):
        with pytest.raises(ValueError):
            attempt(batch, wrong_work)
    with pytest.raises(ValueError):
        attempt(batch, num_programs=0)
    with pytest.raises(ValueError):
        attempt(batch, softcap=-1.0)
