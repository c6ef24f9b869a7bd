"""The fleet as it describes itself: the latest word of every service. Pure: times are arguments, monotonic seconds."""

from collections.abc import Iterator
from typing import NamedTuple

from headrace_shared import telemetry
from headrace_shared.fleet_messages import Hello, Telemetry, WorkerState

SILENT_AFTER_S = 4.0
"""Services speak once a second; who is silent for longer is gone."""
MAX_SERVICES = 4096


class Spoken(NamedTuple):
    """What a service last said of itself."""

    figures: Telemetry
    heard_at: float
    prefill_tokens_per_s: float = 0.0
    """Of a worker: between its last two words."""

    def gauge(self, name: str) -> float:
        return self.figures.gauges.get(name, 0.0)


class Heard(NamedTuple):
    """A worker's latest Hello."""

    hello: Hello
    heard_at: float


class Board:
    def __init__(self) -> None:
        self._spoken: dict[str, Spoken] = {}
        self._hellos: dict[str, Heard] = {}

    def on_telemetry(self, figures: Telemetry, now: float) -> None:
        before = self._spoken.get(figures.id)
        if before is None and len(self._spoken) >= MAX_SERVICES:
            return
        rate = 0.0
        if before is not None:
            # A worker that restarted would have another id; a lost second only widens the time that is divided by.
            computed = figures.gauges.get(telemetry.NUM_PREFILL_TOKENS, 0.0)
            grown = computed - before.gauge(telemetry.NUM_PREFILL_TOKENS)
            rate = max(0.0, grown) / max(now - before.heard_at, 0.1)
        self._spoken[figures.id] = Spoken(figures, now, rate)

    def on_hello(self, hello: Hello, now: float) -> None:
        if hello.state is WorkerState.LEAVING:
            self._hellos.pop(hello.worker, None)
        elif hello.worker in self._hellos or len(self._hellos) < MAX_SERVICES:
            self._hellos[hello.worker] = Heard(hello, now)

    def expire(self, now: float) -> None:
        for each in [key for key, spoken in self._spoken.items() if now - spoken.heard_at > SILENT_AFTER_S]:
            del self._spoken[each]
        for each in [key for key, heard in self._hellos.items() if now - heard.heard_at > SILENT_AFTER_S]:
            del self._hellos[each]

    def of(self, service: str) -> list[Spoken]:
        """All of one kind, by id."""
        return sorted(
            (spoken for spoken in self._spoken.values() if spoken.figures.service == service),
            key=lambda spoken: spoken.figures.id,
        )

    def workers(self) -> Iterator[tuple[Hello, Spoken | None]]:
        """By id. One that has said Hello only has no figures yet: it starts."""
        for worker in sorted(self._hellos):
            yield self._hellos[worker].hello, self._spoken.get(worker)
