"""What the services say about themselves on the bus, by service id."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import structlog

from headrace_cli.process import Supervised
from headrace_shared import telemetry
from headrace_shared.bus import Bus, Message, Subscription
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.subjects import ALL_HELLOS, ALL_TELEMETRY

NOT_READY = ("", "starting", "loading", "draining", "stopping", "leaving")
SILENT_S = 10.0
"""Services speak every second."""
MAX_SERVICES = 1000
"""Ids remembered; the oldest are forgotten first."""

log = structlog.get_logger(__name__)


class ServiceView(NamedTuple):
    state: str = ""
    """Empty: it has said nothing yet."""
    gauges: Mapping[str, float] = MappingProxyType({})
    hello: Hello | None = None
    was_ready: bool = False
    """At some time."""

    @property
    def loading(self) -> tuple[float, float] | None:
        """(done, total) while a model is being loaded."""
        total = self.gauges.get(telemetry.LOADING_TOTAL, 0.0)
        if self.state != WorkerState.LOADING or total <= 0:
            return None
        return min(self.gauges.get(telemetry.LOADING_CURRENT, 0.0), total), total

    @property
    def is_ready(self) -> bool:
        return self.state not in NOT_READY


class FleetView:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._views: dict[str, ServiceView] = {}
        self._heard_at: dict[str, float] = {}
        self._subscriptions: list[Subscription] = []

    async def start(self, bus: Bus) -> None:
        self._subscriptions = [
            await bus.subscribe(ALL_HELLOS, self._on_hello),
            await bus.subscribe(ALL_TELEMETRY, self._on_telemetry),
        ]

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def of(self, service_id: str) -> ServiceView:
        return self._views.get(service_id, ServiceView())

    def shown_state(self, service_id: str) -> str:
        """As it said, unless that is long ago: it is frozen, or cut off from the broker. Empty: it has said nothing
        yet."""
        state, heard_at = self.of(service_id).state, self._heard_at.get(service_id)
        return "silent" if heard_at is not None and self._clock() - heard_at > SILENT_S else state

    def was_ready(self, process: Supervised) -> bool:
        """In its current life, whatever it said last: who fails may say that it leaves. The broker says nothing here:
        it is ready once it runs."""
        return process.phase == "running" if process.spec.service == "nats" else self.of(process.id).was_ready

    def found_ready(self, service_id: str) -> None:
        """It has just done its work: what it last said of itself, up to a second ago, is out of date."""
        self._set(service_id, self.of(service_id)._replace(state="ready"))

    def _on_hello(self, message: Message) -> None:
        try:
            hello = decode(message.data, Hello)
        except ProtocolError as error:
            log.warning("bad hello", error=str(error))
            return
        self._set(hello.worker, self.of(hello.worker)._replace(state=str(hello.state), hello=hello))

    def _on_telemetry(self, message: Message) -> None:
        try:
            figures = read_figures(message.data)
        except ProtocolError as error:
            log.warning("bad telemetry", error=str(error))
            return
        self._set(figures.id, self.of(figures.id)._replace(state=figures.state, gauges=figures.gauges))

    def _set(self, service_id: str, view: ServiceView) -> None:
        before = self._views.pop(service_id, None)
        was_ready = view.is_ready or (before is not None and before.was_ready)
        self._views[service_id] = view._replace(was_ready=was_ready)
        self._heard_at[service_id] = self._clock()
        while len(self._views) > MAX_SERVICES:
            oldest = next(iter(self._views))
            del self._views[oldest], self._heard_at[oldest]
