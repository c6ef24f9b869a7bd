"""What is published, on its way to the socket."""

import asyncio
from collections.abc import Mapping

import pytest

from headrace_shared.errors import BusOverloaded
from headrace_shared.nats_outbox import Outbox


class Broker:
    """Reads nothing while `is_stuck`."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_stuck = False
        self.reads = asyncio.Event()

    def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        if subject == "bad":
            raise AttributeError("a fault of the library")
        self.sent.append(subject)

    async def wait(self) -> None:
        await self.reads.wait()
        self.is_stuck = False

    def outbox(self) -> Outbox:
        outbox = Outbox(self.send, lambda: self.is_stuck, self.wait)
        outbox.start()
        return outbox


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_a_fault_costs_one_message(*, is_stuck: bool) -> None:
    """Else nothing would be published any more, while the connection looks well."""
    broker = Broker()
    broker.is_stuck = is_stuck
    outbox = broker.outbox()
    for subject in ("a", "bad", "c"):
        outbox.put(subject, b"", None)
    broker.reads.set()
    await outbox.flush()
    await outbox.stop()
    assert broker.sent == ["a", "c"]


async def test_what_can_go_goes_at_once() -> None:
    broker = Broker()
    outbox = broker.outbox()
    outbox.put("a", b"", None)
    assert broker.sent == ["a"]
    await outbox.stop()


async def test_nothing_overtakes_what_waits() -> None:
    broker = Broker()
    outbox = broker.outbox()
    broker.is_stuck = True
    outbox.put("a", b"", None)
    await asyncio.sleep(0)
    broker.is_stuck = False
    outbox.put("b", b"", None)
    assert broker.sent == []
    broker.reads.set()
    await outbox.flush()
    outbox.put("c", b"", None)
    assert broker.sent == ["a", "b", "c"]
    await outbox.stop()


async def test_what_waits_is_bounded_and_forgotten_with_the_connection() -> None:
    broker = Broker()
    outbox = broker.outbox()
    broker.is_stuck = True
    with pytest.raises(BusOverloaded):
        for _ in range(1 + Outbox.MAX_BYTES // 1_000_000):
            outbox.put("a", bytes(1_000_000), None)
    await outbox.stop()
    broker.is_stuck = False
    outbox.start()
    outbox.put("b", b"", None)
    await outbox.flush()
    assert broker.sent == ["b"]
    await outbox.stop()
