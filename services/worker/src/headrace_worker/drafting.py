"""Draft tokens by prompt lookup: what followed the last few tokens when they stood in the sequence before.

No model is asked (Saxena, "Prompt Lookup Decoding", 2023). A draft is only a guess that the engine computes together
with the next token; the loop keeps of it what would have been sampled anyway.
"""

from collections.abc import Iterator, Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2
"""Tokens at the end that must have stood in the sequence before. Longer matches are tried first."""


MOST_POSITIONS = 8192
"""Only so many of the latest tokens are looked up: bounds the memory of a sequence."""


class PromptLookup:
    """Where each run of tokens in one sequence was last followed by something. Grows with the sequence, up to
    `most_positions`."""

    __slots__ = ("_first", "_followed", "_most_positions", "_num_indexed")

    def __init__(self, most_positions: int = MOST_POSITIONS) -> None:
        self._most_positions = most_positions
        self._followed: dict[tuple[int, ...], int] = {}
        """Run -> position behind its latest occurrence."""
        self._first = SHORTEST_MATCH
        """The first position that is behind an indexed run."""
        self._num_indexed = SHORTEST_MATCH
        """The first position after them that is not."""

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `tokens`, which begins as at the last call."""
        self._index(tokens)
        length = len(tokens)
        for size in range(min(LONGEST_MATCH, length), SHORTEST_MATCH - 1, -1):
            start = self._followed.get(tuple(tokens[length - size : length]))
            if start is not None:
                return list(tokens[start : start + most])
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Runs that something follows: the one at the very end is what is asked about."""
        first = max(self._first, len(tokens) - self._most_positions)
        for end in range(self._first, min(first, self._num_indexed)):
            for run in _runs(tokens, end):
                if self._followed.get(run) == end:
                    del self._followed[run]
        for end in range(max(self._num_indexed, first), len(tokens)):
            for run in _runs(tokens, end):
                self._followed[run] = end
        self._first = first
        self._num_indexed = max(self._num_indexed, len(tokens))


def _runs(tokens: Sequence[int], end: int) -> Iterator[tuple[int, ...]]:
    for size in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
        yield tuple(tokens[end - size : end])
