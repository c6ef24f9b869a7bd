"""What counters say that may start anew: how many requests came, how fast a worker computes prompts. Pure."""

from typing import NamedTuple

MIN_TOKENS = 256
"""Fewer between two reports say little about the best."""
KEPT = 0.999
"""Of the best, at each report: what was reached once under luckier conditions is forgotten in a quarter of an hour."""


class Arrivals(NamedTuple):
    """Requests that came since we look. Consumers of the queue take what they have counted with them when they go, so
    that their sum may fall: only what is added to it means something."""

    num: int = 0
    counted: int | None = None

    def after(self, counted: int) -> "Arrivals":
        added = 0 if self.counted is None else max(0, counted - self.counted)
        return Arrivals(self.num + added, counted)


class PromptRate(NamedTuple):
    best: float = 0.0
    """Prompt tokens for each second of computing; 0: not known."""
    num_tokens: float = 0.0
    busy_s: float = 0.0

    def after(self, num_tokens: float, busy_s: float) -> "PromptRate":
        """With the counters' next readings. Counters that fell have started anew."""
        tokens, seconds = num_tokens - self.num_tokens, busy_s - self.busy_s
        if tokens < 0 or seconds < 0:
            return PromptRate(self.best, num_tokens, busy_s)
        if tokens < MIN_TOKENS:
            return self
        rate = tokens / seconds if seconds > 0 else 0.0
        return PromptRate(max(self.best * KEPT, rate), num_tokens, busy_s)
