"""Slices of an iteration to the arrays of a frame: numpy only, no Python work per token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_worker.cuda.frame import Frame
from headrace_worker.cuda.places import Places
from headrace_worker.iteration import SequenceSlice
from headrace_worker.noise import noise_keys


class Composed(NamedTuple):
    """What the host knows of a filled frame."""

    num_tokens: int
    num_sequences: int
    num_decodes: int
    """The first sequences, with one token each."""
    longest_chunk: int
    """Tokens of the longest of the others; 0 without any."""
    num_sampled: int
    num_output: NDArray[np.int64]
    """[num_sampled]: tokens drawn for the sequence before this one."""
    first_rows: NDArray[np.int64]
    """Of the slices, in their order."""

    @property
    def is_decode(self) -> bool:
        """One token of each sequence, and all of them are sampled from: rows, sequences and slices are the same."""
        return self.num_sampled == self.num_tokens


def compose(
    frame: Frame[NDArray[Any]], slices: Sequence[SequenceSlice], taken: Sequence[int], places: Places, block_size: int
) -> Composed:
    """Fills the frame. `taken`: the place of each slice's sequence, whose block table is up to date."""
    count = len(slices)
    lengths = np.fromiter((piece.num_tokens for piece in slices), np.int64, count)
    starts = np.fromiter((piece.start for piece in slices), np.int64, count)
    samples = np.fromiter((piece.samples for piece in slices), np.bool_, count)
    at = np.fromiter(taken, np.int64, count)
    # Single queries first; the order is otherwise kept.
    order = np.argsort(lengths > 1, kind="stable")
    ordered_lengths, ordered_at = lengths[order], at[order]
    num_tokens = int(ordered_lengths.sum())
    row_starts = np.cumsum(ordered_lengths) - ordered_lengths
    owners = np.repeat(np.arange(count), ordered_lengths)
    positions = np.arange(num_tokens) + (starts[order] - row_starts)[owners]
    blocks = places.tables[ordered_at[owners], positions // block_size].astype(np.int64)
    ordered = [slices[index] for index in order.tolist()]

    frame.token_ids[:num_tokens] = _token_ids(ordered, num_tokens)
    frame.positions[:num_tokens] = positions
    frame.kv_slots[:num_tokens] = blocks * block_size + positions % block_size
    unknown = np.fromiter((piece.token_ids is None for piece in ordered), np.bool_, count)
    frame.sources[:count] = np.where(unknown, ordered_at, places.null_place)
    frame.places[:count] = ordered_at
    frame.query_starts[:count] = row_starts
    frame.query_starts[count] = num_tokens
    frame.context_lengths[:count] = (starts + lengths)[order]

    last_rows = np.empty(count, dtype=np.int64)
    last_rows[order] = row_starts + ordered_lengths - 1
    sampled_at = at[samples]
    num_sampled = sampled_at.shape[0]
    num_output = (starts + lengths)[samples] - places.num_prompts[sampled_at]
    frame.sampled_rows[:num_sampled] = last_rows[samples]
    frame.sampled_places[:num_sampled] = sampled_at
    frame.temperatures[:num_sampled] = places.temperatures[sampled_at]
    frame.top_ks[:num_sampled] = places.top_ks[sampled_at]
    frame.top_ps[:num_sampled] = places.top_ps[sampled_at]
    frame.min_ps[:num_sampled] = places.min_ps[sampled_at]
    if frame.temperatures[:num_sampled].any():
        frame.keys[:num_sampled] = noise_keys(
            places.seeds[sampled_at], places.choices[sampled_at], num_output.astype(np.uint64)
        )
    num_decodes = int((lengths == 1).sum())
    longest_chunk = int(lengths.max()) if num_decodes < count else 0
    first_rows = last_rows - lengths + 1
    return Composed(num_tokens, count, num_decodes, longest_chunk, num_sampled, num_output, first_rows)


def pad(frame: Frame[NDArray[Any]], start: int, end: int, places: Places, block_size: int) -> None:
    """Makes rows [start, end) of a decode frame harmless: one token of nobody each, in the null block."""
    rows = slice(start, end)
    frame.token_ids[rows] = 0
    frame.positions[rows] = 0
    frame.kv_slots[rows] = int(places.tables[places.null_place, 0]) * block_size
    frame.sources[rows] = places.null_place
    frame.places[rows] = places.null_place
    frame.query_starts[start : end + 1] = np.arange(start, end + 1)
    frame.context_lengths[rows] = 1


def _token_ids(ordered: Sequence[SequenceSlice], num_tokens: int) -> NDArray[np.int64]:
    if num_tokens == len(ordered):
        singles = (0 if piece.token_ids is None else piece.token_ids[0] for piece in ordered)
        return np.fromiter(singles, np.int64, num_tokens)
    known = [(0,) if piece.token_ids is None else piece.token_ids for piece in ordered]
    return np.concatenate([np.asarray(ids, dtype=np.int64) for ids in known])
