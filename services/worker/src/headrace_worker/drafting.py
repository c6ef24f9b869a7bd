"""Draft tokens by prompt lookup: what followed the last few tokens when they stood in the sequence before.

No model is asked (Saxena, "Prompt Lookup Decoding", 2023). A draft is only a guess that the engine computes together
with the next token; the loop keeps of it what would have been sampled anyway.
"""

from collections.abc import Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2
"""Tokens at the end that must have stood in the sequence before. Longer matches are tried first."""


class PromptLookup:
    """Where each run of tokens in one sequence was last followed by something. Grows with the sequence."""

    __slots__ = ("_followed", "_num_indexed")

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}
        """Run -> position behind its latest occurrence."""
        self._num_indexed = 0
        """Positions that are behind an indexed run."""

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
        for end in range(max(self._num_indexed, SHORTEST_MATCH), len(tokens)):
            for size in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._followed[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens))
