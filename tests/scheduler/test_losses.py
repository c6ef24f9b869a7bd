"""Records of losses on the bus."""

import asyncio

import pytest

from headrace_scheduler import losses as module
from headrace_scheduler.losses import Losses
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import RequestId
from headrace_shared.record_messages import LossRecord
from headrace_shared.subjects import LOSSES
from tests.scheduler.shell_builders import prepare, until

R1, R2 = RequestId("1" * 32), RequestId("2" * 32)


class BucketlessBus(MemoryBus):
    num_failures = 0

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        if self.num_failures:
            self.num_failures -= 1
            raise BusUnavailable("scripted failure")
        return await super().put(bucket, key, value)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)


async def test_the_latest_record_is_stored_and_read_by_others(quick: None) -> None:
    bus = BucketlessBus()
    await prepare(bus)
    bus.num_failures = 3
    stored: list[RequestId] = []
    losses = Losses(bus, stored.append)
    losses.store(R1, LossRecord(num_losses=1, suspicion=1))
    losses.store(R1, LossRecord(num_losses=2, suspicion=3, reasons=("worker-1: silent",)))
    task = asyncio.create_task(losses.run())
    await until(lambda: stored == [R1])
    assert await Losses(bus, stored.append).read(R1) == LossRecord(
        num_losses=2, suspicion=3, reasons=("worker-1: silent",)
    )
    assert await losses.read(R2) is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class SlowBus(MemoryBus):
    """Waits after each `put` until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_puts = 0
        self.may_return = asyncio.Semaphore(0)

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        self.num_puts += 1
        revision = await super().put(bucket, key, value)
        await self.may_return.acquire()
        return revision


async def test_a_record_that_comes_while_another_is_written_is_stored_too() -> None:
    bus = SlowBus()
    await prepare(bus)
    stored: list[RequestId] = []
    losses = Losses(bus, stored.append)
    losses.store(R1, LossRecord(num_losses=1, suspicion=1))
    task = asyncio.create_task(losses.run())
    await until(lambda: bus.num_puts == 1)
    newer = LossRecord(num_losses=2, suspicion=2)
    losses.store(R1, newer)
    bus.may_return.release()
    await until(lambda: bus.num_puts == 2)
    assert stored == []
    bus.may_return.release()
    await until(lambda: stored == [R1])
    assert await losses.read(R1) == newer
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_record_that_cannot_be_stored_holds_nobody_up_for_ever(quick: None) -> None:
    bus = BucketlessBus()
    await prepare(bus)
    bus.num_failures = 1_000_000
    stored: list[RequestId] = []
    losses = Losses(bus, stored.append)
    losses.store(R1, LossRecord(num_losses=1, suspicion=2))
    task = asyncio.create_task(losses.run())
    await until(lambda: stored == [R1])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_no_record_counts_for_nothing() -> None:
    bus = BucketlessBus()
    await prepare(bus)
    await bus.put(LOSSES.name, R1, b"\xc1")
    assert await Losses(bus, lambda request_id: None).read(R1) is None
