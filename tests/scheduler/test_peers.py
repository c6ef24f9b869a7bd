"""Which other schedulers there are, and whether they could run something."""

from headrace_scheduler.peers import PRESENCE_S, Peers
from headrace_shared.bus import Message
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.messages import SchedulerId
from headrace_shared.subjects import telemetry_subject


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(peers: Peers, peer: str, num_workers: float = 0.0, state: str = "ready", model: str = "m") -> None:
    gauges = {"num_workers": num_workers}
    telemetry = Telemetry(service="scheduler", id=peer, state=state, model=model, gauges=gauges)
    peers.on_telemetry(Message(telemetry_subject("scheduler", peer), encode(telemetry)))


def test_who_is_heard_is_present_for_a_while() -> None:
    clock = Clock()
    peers = Peers(SchedulerId("s1"), "m", clock)
    tell(peers, "s1")
    tell(peers, "s2")
    tell(peers, "s3", model="other")
    assert peers.num_schedulers == 2 and peers.is_present("s2") and not peers.is_present("s3")
    clock.now += PRESENCE_S + 0.1
    assert peers.num_schedulers == 1 and not peers.is_present("s2")


def test_an_outage_makes_nobody_forgotten() -> None:
    clock = Clock()
    peers = Peers(SchedulerId("s1"), "m", clock)
    tell(peers, "s2", 1.0)
    clock.now += 100.0
    assert not peers.is_present("s2")
    peers.on_reconnect()
    assert peers.is_present("s2") and peers.have_workers
    clock.now += PRESENCE_S + 0.1
    assert not peers.is_present("s2") and not peers.have_workers


def test_only_others_workers_count() -> None:
    clock = Clock()
    peers = Peers(SchedulerId("s1"), "m", clock)
    tell(peers, "s1", 3.0)
    tell(peers, "s2", 0.0)
    assert not peers.have_workers
    tell(peers, "s2", 1.0)
    assert peers.have_workers
    tell(peers, "s2", 1.0, state="draining")
    assert not peers.have_workers and peers.num_schedulers == 1
