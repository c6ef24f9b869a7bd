"""How many schedulers of this model there are, by their telemetry."""

from collections.abc import Callable

from headrace_shared.bus import Bus, Message
from headrace_shared.errors import ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.messages import SchedulerId
from headrace_shared.subjects import telemetry_subject
from headrace_shared.telemetry import NUM_WAITING

PRESENCE_S = 3.0
MAX_PEERS = 1000


class Peers:
    def __init__(self, own_id: SchedulerId, model: str, clock: Callable[[], float]) -> None:
        self._own_id = own_id
        self._model = model
        self._clock = clock
        self._heard_at: dict[str, float] = {}
        self._num_workers: dict[str, float] = {}
        self._num_waiting: dict[str, float] = {}
        self._reconnected_at = clock()

    async def open(self, bus: Bus) -> None:
        """Raises BusUnavailable."""
        await bus.subscribe(telemetry_subject("scheduler", "*"), self.on_telemetry)
        bus.on_reconnect(self.on_reconnect)

    @property
    def num_schedulers(self) -> int:
        """This one included."""
        return 1 + sum(self.is_present(peer) for peer in self._heard_at)

    @property
    def is_first(self) -> bool:
        """Of those that are present, this one tells what is to be told once."""
        return all(self._own_id < peer for peer in self._heard_at if self.is_present(peer))

    def is_present(self, peer: str) -> bool:
        """It was heard of lately; whoever was so when the connection broke gets the time again to be heard."""
        heard_at = self._heard_at.get(peer)
        return heard_at is not None and self._clock() - max(heard_at, self._reconnected_at) <= PRESENCE_S

    @property
    def with_workers(self) -> list[str]:
        """Those, this one not included, that could run something."""
        return [peer for peer in self._heard_at if self._num_workers.get(peer) and self.is_present(peer)]

    @property
    def have_workers(self) -> bool:
        """One of them, this one not included, could run something."""
        return bool(self.with_workers)

    @property
    def num_waiting(self) -> int:
        """Sequences that they hold and have no worker for."""
        return int(sum(self._num_waiting.get(peer, 0.0) for peer in self._heard_at if self.is_present(peer)))

    def on_reconnect(self) -> None:
        self._reconnected_at = self._clock()

    def on_telemetry(self, message: Message) -> None:
        try:
            telemetry = read_figures(message.data)
        except ProtocolError:
            return  # figures of a newer version, perhaps; a peer that cannot be counted takes its share all the same
        # Here and not where they are counted, so that an outage of the broker makes nobody forgotten.
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if self.is_present(peer)}
        if telemetry.id == self._own_id or telemetry.model != self._model:
            return
        if telemetry.state == "draining":
            self._heard_at.pop(telemetry.id, None)
        elif len(self._heard_at) < MAX_PEERS or telemetry.id in self._heard_at:
            self._heard_at[telemetry.id] = self._clock()
        self._num_workers[telemetry.id] = telemetry.gauges.get("num_workers", 0.0)
        self._num_waiting[telemetry.id] = telemetry.gauges.get(NUM_WAITING, 0.0)
        for figures in (self._num_workers, self._num_waiting):
            for peer in figures.keys() - self._heard_at.keys():
                del figures[peer]
