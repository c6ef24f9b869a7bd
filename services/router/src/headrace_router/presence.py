"""Which routers live, by their telemetry, which comes every second, and by the observer's own clock."""

from collections.abc import Callable

from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.subjects import telemetry_subject

PRESENCE_S = 4.0
"""What a router holds counts for so long after it was last heard of."""
MAX_ROUTERS = 1000


class Presence:
    def __init__(self, own_id: str, now: Callable[[], float]) -> None:
        """`now` is a monotonic clock, in seconds."""
        self._own_id = own_id
        self._now = now
        self._heard_at: dict[str, float] = {}
        self._listening_since = now()

    async def open(self, bus: Bus) -> None:
        """Raises BusUnavailable."""
        await bus.subscribe(telemetry_subject("router", "*"), self.on_telemetry)
        bus.on_reconnect(self._on_reconnect)

    def is_alive(self, router: str) -> bool:
        """Who was not heard of may be so only because we have not listened for long."""
        heard_at = self._heard_at.get(router, self._listening_since)
        return router == self._own_id or self._now() - max(heard_at, self._listening_since) <= PRESENCE_S

    def on_telemetry(self, message: Message) -> None:
        try:
            telemetry = decode(message.data, Telemetry)
        except ProtocolError:
            return  # figures of another version; its requests count for a while all the same
        now = self._now()
        if telemetry.id not in self._heard_at and len(self._heard_at) >= MAX_ROUTERS:
            self._heard_at = {router: at for router, at in self._heard_at.items() if now - at <= PRESENCE_S}
        if len(self._heard_at) < MAX_ROUTERS:
            self._heard_at[telemetry.id] = now

    def _on_reconnect(self) -> None:
        self._listening_since = self._now()
