"""Two processes under one id."""

import asyncio

import pytest
from structlog.testing import capture_logs

from headrace_shared import service as service_module
from headrace_shared.bus import Message
from headrace_shared.codec import encode
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.service import Service
from headrace_shared.telemetry import STARTED_AT
from headrace_shared.twins import MAX_TWINS, NUM_WORDS, TwinWatch
from tests.patience import PATIENCE_S

OWN = 1_000.0


def word(started_at: float, state: str = "ready") -> Message:
    telemetry = Telemetry(service="worker", id="worker-1", state=state, gauges={STARTED_AT: started_at})
    return Message("_INBOX_worker.twins.worker-1", encode(telemetry), {})


@pytest.mark.parametrize(
    ("words", "gives_way"),
    [
        ([word(OWN - 5.0)] * NUM_WORDS, True),
        ([word(OWN - 5.0)] * (NUM_WORDS - 1), False),
        ([word(OWN - 5.0, "draining")] * 9, False),
        ([word(OWN + 5.0)] * 9, False),
        ([word(OWN)] * 9, False),
        ([word(0.0)] * 9, False),
        ([word(OWN - 5.0), word(OWN - 4.0)] * NUM_WORDS, True),
        ([word(OWN - 5.0), word(OWN + 4.0)] * NUM_WORDS, True),
        ([word(OWN - 1.0 - number) for number in range(9)] * (NUM_WORDS - 1), False),
        ([word(OWN - 1.0 - number) for number in range(1000)] * NUM_WORDS, False),
        ([Message("_INBOX_worker.twins.worker-1", b"junk", {})] * 9, False),
    ],
    ids=[
        *("older", "about to end", "drains", "younger", "itself", "an old version"),
        *("two older", "an older one of two", "predecessors", "no one in particular", "junk"),
    ],
)
def test_who_gives_way(words: list[Message], gives_way: bool) -> None:
    gone: list[bool] = []
    watch = TwinWatch(OWN, lambda: gone.append(True))
    for each in words:
        watch.on_telemetry(each)
    assert bool(gone) is gives_way
    assert len(watch._num_heard) <= MAX_TWINS


async def test_of_two_services_the_later_one_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TELEMETRY_PERIOD_S", 0.02)
    broker = MemoryBroker()
    services = [Service("router", "same"), Service("router", "same"), Service("scheduler", "same")]

    async def run(service: Service) -> int:
        async def body(service: Service) -> None:
            service.spawn(service.report(MemoryBus(broker), lambda: "ready", dict), "telemetry")
            await asyncio.sleep(PATIENCE_S)

        return await service.run(body, 0.0)

    with capture_logs() as logs:
        tasks = [asyncio.create_task(run(service)) for service in services]
        assert await asyncio.wait_for(tasks[1], PATIENCE_S) == 1
        assert not tasks[0].done() and not tasks[2].done()
    reason = "another router runs under the id same: each needs a HEADRACE_SERVICE_ID of its own"
    assert [entry["reason"] for entry in logs if entry["event"] == "service failed"] == [reason]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
