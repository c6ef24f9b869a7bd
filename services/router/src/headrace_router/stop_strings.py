"""Finds stop strings in text that arrives in pieces. Pure.

Nothing that may still become a stop string is given out, and nothing else is held back. Where the pieces are cut makes
no difference: of all matches the one that is complete first counts, and of those that end together the longest.
"""

from collections.abc import Sequence


class StopStrings:
    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are not empty strings. With `include` the stop string itself is given out too."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns what may be shown. After a match (`matched`) the rest is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        length = len(text) - self._longest_open_tail(text)
        self._held = text[length:]
        return text[:length]

    def release(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_open_tail(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
