"""What a flood from the page has felt so far. Pure: times are arguments, seconds since it began."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from headrace_shared.quantiles import quantile

MAX_RECENT = 512


@dataclass(slots=True)
class FloodCall:
    due_at: float
    """Latency counts from here: a call that is sent late has waited, too."""
    first_at: float | None = None
    num_chunks: int = 0


class FloodTally:
    def __init__(self) -> None:
        self.num_due = 0
        self.num_open = 0
        self.num_complete = 0
        self.num_left_out = 0
        """Beyond the bound on open calls."""
        self.errors: dict[str, int] = {}
        self._num_chunks = 0
        self._told_chunks = 0
        self._told_at = 0.0
        self._ttfts: deque[float] = deque(maxlen=MAX_RECENT)
        self._num_ttfts = 0

    def begin(self, due_at: float) -> FloodCall:
        self.num_due += 1
        self.num_open += 1
        return FloodCall(due_at)

    def leave_out(self) -> None:
        self.num_due += 1
        self.num_left_out += 1

    def chunks(self, call: FloodCall, count: int, now: float) -> None:
        """Pieces of text have come."""
        if call.first_at is None and count:
            call.first_at = now
            self._ttfts.append(now - call.due_at)
            self._num_ttfts += 1
        call.num_chunks += count
        self._num_chunks += count

    def end(self, call: FloodCall, error: str) -> None:
        """`error` is empty if the answer is whole."""
        self.num_open -= 1
        if error:
            self.errors[error] = self.errors.get(error, 0) + 1
        else:
            self.num_complete += 1

    def tell(self, now: float) -> dict[str, Any]:
        """For the page; rates are since the last telling, latencies of the first tokens since then too."""
        period_s = max(now - self._told_at, 1e-3)
        recent = list(self._ttfts)[-self._num_ttfts :] if self._num_ttfts else []
        told = {
            "at": round(now, 2),
            "due": self.num_due,
            "open": self.num_open,
            "complete": self.num_complete,
            "left_out": self.num_left_out,
            "errors": self.errors,
            "tokens_per_s": round((self._num_chunks - self._told_chunks) / period_s, 1),
            "ttft_p50_ms": _ms(recent, 0.5),
            "ttft_p99_ms": _ms(recent, 0.99),
        }
        self._told_at, self._told_chunks, self._num_ttfts = now, self._num_chunks, 0
        return told


def _ms(values: list[float], share: float) -> float | None:
    return round(1000.0 * quantile(values, share), 1) if values else None
