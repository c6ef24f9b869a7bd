"""How attention is cut into pieces."""

import pytest
import torch

from headrace_worker.kernels.attention_plan import SHORTEST_SPLIT, plan_decode, plan_prefill


def decode_pieces(
    lengths: list[int],
    device: torch.device,
    *,
    num_wanted: int,
    window: int | None = None,
    fixed_split: int | None = None,
    room: int = 64,
) -> list[list[tuple[int, int]]]:
    """Each row's (first position, end), having checked the lists against each other."""
    pieces = torch.full((room, 4), -7, dtype=torch.int32, device=device)
    first_pieces = torch.full((len(lengths) + 1,), -7, dtype=torch.int32, device=device)
    context_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan_decode(
        context_lengths, pieces, first_pieces, num_wanted=num_wanted, max_rows=9, window=window, fixed_split=fixed_split
    )
    firsts = first_pieces.tolist()
    assert firsts[0] == 0
    rows = []
    for row in range(len(lengths)):
        mine = pieces[firsts[row] : firsts[row + 1]].tolist()
        assert all(piece[0] == row and piece[3] == len(mine) for piece in mine)
        rows.append([(piece[1], piece[2]) for piece in mine])
    assert (pieces[firsts[-1] :] == -7).all()
    return rows


def check_cover(rows: list[list[tuple[int, int]]], lengths: list[int], window: int | None = None) -> None:
    for row, length in zip(rows, lengths, strict=True):
        position = max(0, length - window) if window else 0
        for start, stop in row:
            assert start == position < stop
            position = stop
        assert position == length


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize("num_wanted", [1, 5, 40])
def test_pieces_cover_what_a_row_sees_once(num_wanted: int, window: int | None, device: torch.device) -> None:
    lengths = [1, 0, 255, 256, 257, 9000, 64, 3000, 0]
    rows = decode_pieces(lengths, device, num_wanted=num_wanted, window=window)
    check_cover(rows, lengths, window)
    assert sum(map(len, rows)) <= num_wanted + len(lengths)


def test_long_contexts_share_the_device_evenly(device: torch.device) -> None:
    rows = decode_pieces([20_000, 40_000, 60_000], device, num_wanted=12)
    sizes = [stop - start for row in rows for start, stop in row]
    assert 10 <= len(sizes) <= 15
    assert max(sizes) <= 1.1 * 120_000 / 12


def test_short_contexts_are_not_cut(device: torch.device) -> None:
    lengths = [SHORTEST_SPLIT] * 3
    rows = decode_pieces(lengths, device, num_wanted=50)
    assert [len(row) for row in rows] == [1, 1, 1]


def test_fixed_splits_depend_on_the_row_alone(device: torch.device) -> None:
    lengths = [700, 64, 65]
    together = decode_pieces(lengths, device, num_wanted=1, fixed_split=64)
    check_cover(together, lengths)
    assert [len(row) for row in together] == [11, 1, 2]
    for length, row in zip(lengths, together, strict=True):
        assert decode_pieces([length], device, num_wanted=9, fixed_split=64) == [row]


def test_there_must_be_room(device: torch.device) -> None:
    for arguments in ({"num_wanted": 60}, {"num_wanted": 0}, {"num_wanted": 1, "window": 0}):
        with pytest.raises(ValueError):
            decode_pieces([1] * 5, device, **arguments)
    with pytest.raises(ValueError):
        decode_pieces([1], device, num_wanted=1, fixed_split=0)
    with pytest.raises(ValueError):
        decode_pieces([1] * 10, device, num_wanted=1)


def test_prompts_are_cut_into_tiles_of_queries(device: torch.device) -> None:
    counts = [1, 1, 9, 4, 3]
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    pieces = torch.full((12, 2), -7, dtype=torch.int32, device=device)
    plan_prefill(starts, pieces, first_sequence=2, queries_per_piece=4, max_sequences=8)
    assert pieces[0, 0] == 5
    # Those with the longest context come first.
    assert pieces[1:6].tolist() == [[2, 8], [2, 4], [2, 0], [3, 0], [4, 0]]
    assert (pieces[6:] == -7).all()
    with pytest.raises(ValueError):
        plan_prefill(starts, pieces, first_sequence=5, queries_per_piece=4, max_sequences=8)
    with pytest.raises(ValueError):
        plan_prefill(starts, pieces, first_sequence=0, queries_per_piece=0, max_sequences=8)
    with pytest.raises(ValueError):
        plan_prefill(starts, pieces, first_sequence=0, queries_per_piece=4, max_sequences=4)
