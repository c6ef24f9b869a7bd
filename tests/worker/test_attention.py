"""Attention over pages against the plain formula."""

import math
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.attention.cpu import GatherAttention
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kv_cache import KVCache

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 200, 4
CPU = torch.device("cpu")


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def plain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, first_position: int, window: int | None = None
) -> Tensor:
    """queries [n, heads, d], keys and values [positions, kv_heads, d] -> [n, heads * d]; causal, in float64."""
    per_kv_head = queries.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(per_kv_head, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / math.sqrt(queries.shape[-1])
    positions = torch.arange(keys.shape[0])[None, :]
    own = first_position + torch.arange(queries.shape[0])[:, None]
    hidden = (positions > own) if window is None else (positions > own) | (positions <= own - window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class Batch:
    """Random sequences, of which everything before the slice is in the cache already."""

    def __init__(
        self,
        shape: Shape,
        lengths: list[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
    ) -> None:
        """`lengths`: (start, number of queries) of each sequence."""
        self.shape = shape
        self.window = window
        self.cache = KVCache(
            num_layers=NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=CPU,
        )
        self.cache.pages[:, :NUM_BLOCKS] = torch.nan
        free = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(free)
        generator = torch.Generator().manual_seed(2)
        self.slices: list[SequenceSlice] = []
        self.keys_values: list[Tensor] = []
        """[positions, 2 * num_kv_heads, head_dim] of each sequence"""
        self.queries: list[Tensor] = []
        for number, (start, count) in enumerate(lengths):
            blocks = [BlockId(free.pop()) for _ in range(-(-(start + count) // BLOCK_SIZE))]
            self.slices.append(SequenceSlice(SequenceId(number), start, count, [0] * count, blocks, True))
            sizes = (start + count, 2 * shape.num_kv_heads, shape.head_dim)
            self.keys_values.append(torch.randn(sizes, generator=generator).to(dtype))
            self.queries.append(torch.randn((count, shape.num_heads, shape.head_dim), generator=generator).to(dtype))
            for position in range(start):
                page = self.cache.pages[1, blocks[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE]
                page.copy_(self.keys_values[-1][position].view(page.shape))
            if start % BLOCK_SIZE:
                self.cache.clear_after(blocks[start // BLOCK_SIZE], start % BLOCK_SIZE)

    def attend(self, gathered_positions: int | None = None) -> list[Tensor]:
        """Runs layer 1 as the engine does; the results of each sequence."""
        attention = GatherAttention(
            self.cache,
            num_heads=self.shape.num_heads,
            context=NUM_BLOCKS * BLOCK_SIZE,
            scale=self.shape.head_dim**-0.5,
            windows=[None, self.window],
        )
        inputs = build_inputs(
            self.slices,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.shape.num_kv_heads,
            null_block=self.cache.null_block,
            gathered_positions=gathered_positions or attention.gathered_positions,
            device=CPU,
        )
        # build_inputs orders the rows; the sampled rows tell where each sequence's last token went.
        ends = inputs.sampled_rows.tolist()
        rows = [slice(end - piece.num_tokens + 1, end + 1) for end, piece in zip(ends, self.slices, strict=True)]
        num_tokens = inputs.token_ids.shape[0]
        queries = torch.empty((num_tokens, self.shape.num_heads, self.shape.head_dim), dtype=self.queries[0].dtype)
        new = torch.empty((num_tokens, 2 * self.shape.num_kv_heads, self.shape.head_dim), dtype=queries.dtype)
        for place, piece, query, keys_values in zip(rows, self.slices, self.queries, self.keys_values, strict=True):
            queries[place] = query
            new[place] = keys_values[piece.start :]
        self.cache.clear_blocks(inputs.fresh_blocks)
        self.cache.write(1, inputs.slots, new)
        mixed = attention.prepare(inputs, self.cache)(1, queries)
        return [mixed[place] for place in rows]

    def expected(self) -> list[Tensor]:
        results = []
        for piece, query, keys_values in zip(self.slices, self.queries, self.keys_values, strict=True):
            keys, values = keys_values.chunk(2, dim=1)
            results.append(plain_attention(query, keys, values, piece.start, self.window))
        return results


SHAPES = [Shape(9, 3, 16), Shape(4, 4, 8), Shape(8, 1, 32)]
LENGTHS = {
    "decoding alone": [(17, 1)],
    "first token": [(0, 1)],
    "decoding together": [(start, 1) for start in (0, 3, 4, 5, 50, 51, 52, 120)],
    "a whole prompt": [(0, 40)],
    "a later chunk": [(37, 40)],
    "short chunks": [(0, 2), (5, 3), (20, 7), (31, 5)],
    "everything": [(60, 1), (0, 33), (9, 2), (3, 1), (100, 35), (15, 1), (2, 9), (7, 1)],
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_attention_equals_the_plain_formula(shape: Shape, lengths: list[tuple[int, int]]) -> None:
    batch = Batch(shape, lengths)
    for result, expected in zip(batch.attend(), batch.expected(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 6, 31, 500])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_windowed_attention_equals_the_plain_formula(window: int, lengths: list[tuple[int, int]]) -> None:
    batch = Batch(SHAPES[0], lengths, window=window)
    for result, expected in zip(batch.attend(), batch.expected(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_lies_wholly_before_a_window_is_not_read() -> None:
    batch = Batch(SHAPES[0], [(40, 1), (90, 3)], window=9)
    for piece in batch.slices:
        batch.cache.pages[:, piece.block_ids[: (piece.start - 8) // BLOCK_SIZE]] = torch.nan
    for result, expected in zip(batch.attend(), batch.expected(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gathered_positions", [BLOCK_SIZE, 60, 1000])
def test_the_size_of_groups_changes_nothing(gathered_positions: int) -> None:
    batch = Batch(SHAPES[0], LENGTHS["everything"])
    for result, expected in zip(batch.attend(gathered_positions), batch.expected(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_in_bfloat16_is_as_good_as_its_numbers() -> None:
    batch = Batch(SHAPES[0], LENGTHS["everything"], dtype=torch.bfloat16)
    for result, expected in zip(batch.attend(), batch.expected(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_a_sequence_of_nan_leaves_its_neighbours_alone() -> None:
    batch = Batch(SHAPES[0], LENGTHS["decoding together"])
    batch.keys_values[4][-1] = torch.nan
    batch.queries[6][:] = torch.nan
    results = batch.attend()
    assert results[4].isnan().all()
    assert results[6].isnan().all()
    for index, expected in enumerate(batch.expected()):
        if index not in (4, 6):
            torch.testing.assert_close(results[index].double(), expected, rtol=1e-4, atol=1e-5)
