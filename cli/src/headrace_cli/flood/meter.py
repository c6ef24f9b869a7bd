"""What happened to each request, second by second and in all. Pure: times are arguments, seconds since the flood began.

Every latency counts from the moment when the request was due, not from when it was sent: a generator that is held up
does not make the server look better (Tene's "coordinated omission").
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_cli.flood.histogram import Histogram

UNFINISHED = "unfinished"
"""Of a request that was still running when the flood was over: no error of the server's."""


@dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    due_at: float
    sent_at: float | None = None
    first_at: float | None = None
    """First text of the answer."""
    last_at: float | None = None
    """Latest text of the answer."""
    ended_at: float | None = None
    num_chunks: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    """As the server says; the number of chunks if it says nothing."""
    error: str = ""
    """Empty: none, so far."""

    @property
    def is_complete(self) -> bool:
        return self.ended_at is not None and not self.error

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.due_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first; None if there is no second."""
        if self.first_at is None or self.last_at is None or self.num_output_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class Second:
    """Of the flood's time."""

    num_due: int = 0
    num_complete: int = 0
    num_errors: int = 0
    num_chunks: int = 0
    num_open: int = 0
    """At its end."""
    ttfts_s: list[float] = field(default_factory=list)
    """Of the first tokens that came in it."""


class Slo(NamedTuple):
    ttft_s: float
    tpot_s: float

    def is_met(self, exchange: Exchange) -> bool:
        ttft_s, tpot_s = exchange.ttft_s, exchange.tpot_s
        if not exchange.is_complete or ttft_s is None:
            return False
        return ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)


class Window(NamedTuple):
    """The part of the flood that the figures are about."""

    begin: float
    end: float

    def holds(self, at: float) -> bool:
        return self.begin <= at < self.end


class Meter:
    def __init__(self, window: Window, slo: Slo) -> None:
        self.window = window
        self.slo = slo
        self.exchanges: list[Exchange] = []
        self.gaps = Histogram()
        """Between two chunks of an answer, within the window."""
        self.seconds: list[Second] = []
        self.num_open = 0
        self.num_complete = 0
        self.num_good = 0
        self.num_window_chunks = 0
        self.errors: dict[str, int] = {}
        self.recent_ttfts: deque[float] = deque(maxlen=2000)
        self.recent_gaps: deque[float] = deque(maxlen=5000)

    def due(self, at: float) -> Exchange:
        exchange = Exchange(at)
        self.exchanges.append(exchange)
        self._second(at).num_due += 1
        self.num_open += 1
        return exchange

    def sent(self, exchange: Exchange, now: float) -> None:
        exchange.sent_at = now

    def chunk(self, exchange: Exchange, now: float) -> None:
        """Text has come."""
        exchange.num_chunks += 1
        if exchange.last_at is None:
            exchange.first_at = now
            seconds = now - exchange.due_at
            self.recent_ttfts.append(seconds)
            second = self._second(now)
            second.ttfts_s.append(seconds)
        else:
            gap = now - exchange.last_at
            second = self._second(now)
            self.recent_gaps.append(gap)
            if self.window.holds(now):
                self.gaps.add(gap)
        exchange.last_at = now
        second.num_chunks += 1
        self.num_window_chunks += self.window.holds(now)

    def ended(self, exchange: Exchange, now: float, error: str = "") -> None:
        exchange.ended_at = now
        exchange.error = error
        exchange.num_output_tokens = exchange.num_output_tokens or exchange.num_chunks
        self.num_open -= 1
        second = self._second(now)
        if error:
            self.errors[error] = self.errors.get(error, 0) + 1
            second.num_errors += error != UNFINISHED
        else:
            self.num_complete += 1
            self.num_good += self.slo.is_met(exchange)
            second.num_complete += 1

    @property
    def tokens_per_chunk(self) -> float:
        """Servers may send several tokens at once, and say how many there were only at the end."""
        complete = [exchange for exchange in self.exchanges if exchange.is_complete]
        num_chunks = sum(exchange.num_chunks for exchange in complete)
        return sum(exchange.num_output_tokens for exchange in complete) / num_chunks if num_chunks else 1.0

    def tick(self, now: float) -> None:
        """Once a second or more often."""
        self._second(now).num_open = self.num_open

    def _second(self, at: float) -> Second:
        index = max(0, int(at))
        while len(self.seconds) <= index:
            self.seconds.append(Second(num_open=self.num_open))
        return self.seconds[index]
