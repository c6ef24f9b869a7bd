"""From slices to tensors."""

import random

import pytest
import torch

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.inputs import LONG_CHUNK, MOST_PADDING, Inputs, build_inputs
from headrace_worker.iteration import SequenceSlice

BLOCK_SIZE = 4
NULL_BLOCK = 99


def piece(number: int, start: int, tokens: list[int], blocks: list[int], *, samples: bool = True) -> SequenceSlice:
    return SequenceSlice(SequenceId(number), start, len(tokens), tokens, [BlockId(block) for block in blocks], samples)


def build(slices: list[SequenceSlice], gathered_positions: int = 10_000) -> Inputs:
    return build_inputs(
        slices,
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        null_block=NULL_BLOCK,
        gathered_positions=gathered_positions,
        device=torch.device("cpu"),
    )


def test_a_mixed_batch() -> None:
    chunk = piece(1, 2, [10, 11, 12], [7, 3, 50])
    decode = piece(2, 5, [20], [1, 0])
    middle = piece(3, 0, [30, 31], [9], samples=False)
    inputs = build([chunk, decode, middle])
    # The decoding sequence comes first, then the chunks by length.
    assert inputs.token_ids.tolist() == [20, 30, 31, 10, 11, 12]
    assert inputs.positions.tolist() == [5, 0, 1, 2, 3, 4]
    assert inputs.sampled_rows.tolist() == [5, 0], "in slice order, without the slice that does not sample"
    blocks_and_offsets = [(0, 1), (9, 0), (9, 1), (7, 2), (7, 3), (3, 0)]
    expected = [
        [((block * 2 + part) * 2 + head) * BLOCK_SIZE + offset for part in range(2) for head in range(2)]
        for block, offset in blocks_and_offsets
    ]
    assert inputs.slots.tolist() == expected
    assert sorted(inputs.fresh_blocks.tolist()) == [3, 9], "begun here and not completed; the decoding one's is not new"
    assert [group.num_queries for group in inputs.groups] == [[1], [2, 3]]
    assert inputs.groups[1].block_table.tolist() == [[9, NULL_BLOCK], [7, 3]]
    assert inputs.groups[1].last_positions.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("start", "count", "fresh"), [(0, 4, []), (0, 3, [5]), (3, 1, []), (4, 1, [6]), (3, 2, [6]), (4, 4, []), (5, 1, [])]
)
def test_blocks_are_fresh_when_begun_and_left_unfilled(start: int, count: int, fresh: list[int]) -> None:
    assert build([piece(1, start, [0] * count, [5, 6])]).fresh_blocks.tolist() == fresh


def test_an_unknown_token_is_an_error() -> None:
    unknown = SequenceSlice(SequenceId(1), 0, 1, None, [BlockId(0)], True)
    with pytest.raises(ValueError, match="look ahead"):
        build([unknown])


def test_groups_cover_every_sequence_once_within_their_bounds() -> None:
    rng = random.Random(0)
    for _ in range(100):
        slices = []
        for number in range(rng.randint(1, 40)):
            start, count = rng.randint(0, 2000), rng.choice([1, 1, 1, rng.randint(2, 80)])
            blocks = [0] * -(-(start + count) // BLOCK_SIZE)
            slices.append(piece(number, start, [0] * count, blocks))
        inputs = build(slices, gathered_positions=3000)
        row = 0
        for group in inputs.groups:
            assert group.first_row == row
            row += sum(group.num_queries)
            assert len(group.num_queries) == group.block_table.shape[0] == group.last_positions.shape[0]
            if len(group.num_queries) > 1:
                assert group.block_table.size * BLOCK_SIZE <= 3000
                assert (group.block_table == NULL_BLOCK).sum() * BLOCK_SIZE <= MOST_PADDING
                assert max(group.num_queries) < LONG_CHUNK
                assert max(group.num_queries) == 1 or min(group.num_queries) > 1
        assert row == inputs.token_ids.shape[0]
        assert sum(len(group.num_queries) for group in inputs.groups) == len(slices)
