"""Into the queue once or not at all, whatever the broker answers; honest refusals otherwise."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from headrace_router.admission import QUEUE_DOUBT_S, TRIAL_PERIOD_S, QueueHealth
from headrace_router.cancellation import Canceller
from headrace_router.choices import ChoiceText
from headrace_router.detokenization import build_vocabulary
from headrace_router.generation import Generation, Limits
from headrace_router.inflight import InFlightTable
from headrace_router.prompt import Prompt
from headrace_router.settings import RouterSettings
from headrace_shared.bus import Handler
from headrace_shared.errors import BusUnavailable, OutcomeUnknown, Overloaded, PayloadTooLarge, QueueFull
from headrace_shared.memory_bus import MemoryBroker, MemoryBus, MemorySubscription
from headrace_shared.messages import Request, RequestId, RouterId, SamplingParams, StopParams
from headrace_shared.subjects import ALL_HELLOS, ALL_TELEMETRY, CANCELS, TOKENS, requests_stream
from tests.byte_model import MODEL, byte_level_tokenizer
from tests.router.support import running_router, says, until

VOCABULARY = build_vocabulary(byte_level_tokenizer().to_str().encode())


class FlakyBus(MemoryBus):
    """Enqueues to the request queue fail as told; `stored` says whether the broker had the message all the same."""

    def __init__(self, broker: MemoryBroker, failures: Sequence[tuple[Exception, bool]]) -> None:
        super().__init__(broker)
        self.failures = list(failures)
        self.num_attempts = 0

    async def enqueue(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        if subject.startswith("requests."):
            self.num_attempts += 1
            if self.failures:
                error, is_stored = self.failures.pop(0)
                if is_stored:
                    await super().enqueue(subject, data, message_id=message_id, headers=headers)
                raise error
        return await super().enqueue(subject, data, message_id=message_id, headers=headers)


class Setup:
    def __init__(
        self, failures: Sequence[tuple[Exception, bool]], num_prompts: int = 1, timeout_s: float = 1.0
    ) -> None:
        self.broker = MemoryBroker()
        self.bus = FlakyBus(self.broker, failures)
        self.table = InFlightTable(self.bus, RouterId("router-1"))
        self.canceller = Canceller(self.bus, self.table)
        self.limits = Limits(10.0, 10.0, timeout_s, 100)
        self.requests = [
            Request(
                request_id=RequestId(f"{i:032x}"),
                router=RouterId("router-1"),
                model=MODEL,
                prompt=b"\1\0\0\0",
                sampling=SamplingParams(seed=1),
                stop=StopParams(max_tokens=4),
            )
            for i in range(num_prompts)
        ]

    async def start(self) -> Generation:
        for stream in (requests_stream(max(100, len(self.requests)), 1_000_000), TOKENS, CANCELS):
            await self.bus.ensure_stream(stream)
        await self.table.start()
        prompts = [Prompt(request, [ChoiceText(VOCABULARY)]) for request in self.requests]
        return Generation(prompts, bus=self.bus, table=self.table, canceller=self.canceller, limits=self.limits)

    def num_queued(self) -> int:
        return len(self.broker.streams["REQUESTS"].stored)

    def num_cancels(self) -> int:
        return len(self.broker.streams["CANCELS"].stored)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_unknown_outcome_is_resolved_to_exactly_one_message(is_stored: bool) -> None:
    setup = Setup([(OutcomeUnknown("?"), is_stored), (OutcomeUnknown("?"), False)])
    async with await setup.start():
        assert setup.num_queued() == 1
        assert setup.bus.num_attempts == 3
    await setup.canceller.close()


async def test_an_outcome_that_stays_unknown_leaves_no_ghost() -> None:
    setup = Setup([(OutcomeUnknown("?"), True)] + [(OutcomeUnknown("?"), False)] * 100, timeout_s=0.3)
    generation = await setup.start()
    with pytest.raises(Overloaded):
        async with generation:
            pass
    await setup.canceller.close()
    assert setup.num_cancels() == 1  # whoever pulls it finds the tombstone
    assert len(setup.table) == 0


async def test_a_broker_that_is_away_for_a_moment_is_waited_for() -> None:
    setup = Setup([(BusUnavailable("away"), False)] * 3)
    async with await setup.start():
        assert setup.num_queued() == 1
    await setup.canceller.close()


async def test_a_broker_that_stays_away_is_a_quick_refusal_without_a_trace() -> None:
    setup = Setup([(BusUnavailable("away"), False)] * 100, timeout_s=0.2)
    generation = await setup.start()
    with pytest.raises(Overloaded) as caught:
        async with generation:
            pass
    await setup.canceller.close()
    assert caught.value.retry_after_s <= 120
    assert (setup.num_queued(), setup.num_cancels(), len(setup.table)) == (0, 0, 0)


@pytest.mark.parametrize("error", [QueueFull("full"), PayloadTooLarge(2, 1)])
async def test_a_refused_prompt_takes_the_others_of_its_call_back(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup([], num_prompts=3)
    generation = await setup.start()
    original = setup.bus.enqueue

    async def enqueue(subject: str, data: bytes, **rest: Any) -> int:
        if subject.startswith("requests.") and setup.num_queued() == 2:
            raise error
        return await original(subject, data, **rest)

    monkeypatch.setattr(setup.bus, "enqueue", enqueue)
    with pytest.raises(type(error)):
        async with generation:
            pass
    await until(lambda: setup.num_queued() == 0)
    await setup.canceller.close()
    assert setup.num_cancels() == 2
    assert len(setup.table) == 0


async def test_a_client_that_leaves_while_its_request_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup([])
    generation = await setup.start()
    original = setup.bus.enqueue

    async def slow(subject: str, data: bytes, **rest: Any) -> int:
        sequence = await original(subject, data, **rest)
        if subject.startswith("requests."):
            await asyncio.sleep(10)
        return sequence

    monkeypatch.setattr(setup.bus, "enqueue", slow)
    task = asyncio.create_task(generation.__aenter__())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await setup.canceller.close()
    assert setup.num_cancels() == 1


async def test_a_full_queue_is_429_and_the_queue_recovers() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, queue_max_messages=2)
    async with running_router(says("ok"), settings=settings) as router:
        router.worker.is_taking = False
        await asyncio.sleep(0.1)
        body = {"model": MODEL, "prompt": "a"}
        waiting = [asyncio.create_task(router.client.post("/v1/completions", json=body)) for _ in range(2)]
        await until(lambda: len(router.broker.streams["REQUESTS"].stored) == 2)
        reply = await router.client.post("/v1/completions", json=body)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "queue_full"
        assert 1 <= int(reply.headers["retry-after"]) <= 120
        router.worker.is_taking = True
        assert [(await task).status_code for task in waiting] == [200, 200]


async def test_too_many_calls_at_once() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, max_inflight=1)
    async with running_router(says("okay", pause_s=0.1), settings=settings) as router:
        body = {"model": MODEL, "prompt": "a"}
        first = asyncio.create_task(router.client.post("/v1/completions", json=body))
        await until(lambda: bool(router.worker.requests))
        assert (await router.client.post("/v1/completions", json=body)).status_code == 429
        assert (await first).status_code == 200


async def test_while_the_broker_is_away_refusals_are_quick_and_health_says_so() -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, publish_timeout_s=0.3)
    async with running_router(says("ok"), settings=settings) as router:
        body = {"model": MODEL, "prompt": "a"}
        router.broker.stop()
        await asyncio.sleep(0.35)
        for _ in range(2):
            reply = await asyncio.wait_for(router.client.post("/v1/completions", json=body), 1.0)
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) <= 120
        assert (await router.client.get("/health")).status_code == 503
        assert (await router.client.get("/live")).status_code == 200
        router.broker.start()
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200


async def test_a_broker_that_is_connected_and_stores_nothing_makes_the_router_unready() -> None:
    """As with a full disk. Once a request has got through, or some time has passed, requests are wanted again."""
    settings = RouterSettings(port=0, drain_delay_s=0.0, publish_timeout_s=0.1)
    async with running_router(says("ok"), settings=settings) as router:
        original = router.bus.enqueue
        is_full = True

        async def enqueue(subject: str, data: bytes, **rest: Any) -> int:
            if is_full:
                raise OutcomeUnknown("no answer")
            return await original(subject, data, **rest)

        router.bus.enqueue = enqueue  # type: ignore[method-assign]  # a broker whose disk is full
        body = {"model": MODEL, "prompt": "a"}
        assert (await router.client.get("/health")).status_code == 200
        assert (await router.client.post("/v1/completions", json=body)).status_code == 503
        health = await router.client.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the queue does not answer")
        is_full = False
        assert (await router.client.post("/v1/completions", json=body)).status_code == 200
        assert (await router.client.get("/health")).status_code == 200


class _Unlucky(MemoryBus):
    """Its broker goes away each time that one of the router's own tasks begins to listen."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.failures = {ALL_HELLOS: 2, ALL_TELEMETRY: 1}

    async def subscribe(self, subject: str, handler: Handler) -> MemorySubscription:
        if self.failures.get(subject, 0):
            self.failures[subject] -= 1
            raise BusUnavailable("the connection broke before the answer came")
        return await super().subscribe(subject, handler)


async def test_a_broker_that_goes_away_while_a_router_begins_does_not_end_it() -> None:
    broker = MemoryBroker()
    bus = _Unlucky(broker)
    async with running_router(says("ok"), buses=(bus, MemoryBus(broker))) as router:
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.status_code == 200
        await until(lambda: not any(bus.failures.values()))


async def test_while_the_queue_is_in_doubt_one_tries_and_nobody_else_waits_for_it() -> None:
    """A broker whose disk is full answers nothing, and each call waited for its patience to end."""
    settings = RouterSettings(port=0, drain_delay_s=0.0, publish_timeout_s=0.1)
    async with running_router(says("ok"), settings=settings) as router:
        tried: set[str] = set()

        async def enqueue(subject: str, data: bytes, *, message_id: str, **rest: Any) -> int:
            if subject.startswith("requests."):
                tried.add(message_id)
            raise OutcomeUnknown("no answer")

        router.bus.enqueue = enqueue  # type: ignore[method-assign]
        body = {"model": MODEL, "prompt": "a"}
        assert (await router.client.post("/v1/completions", json=body)).status_code == 503
        tried.clear()
        replies = await asyncio.gather(*(router.client.post("/v1/completions", json=body) for _ in range(20)))
        assert {reply.status_code for reply in replies} == {503}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        assert len(tried) == 1


def test_a_queue_that_failed_is_in_doubt_for_a_while() -> None:
    now = 100.0
    health = QueueHealth(lambda: now)
    assert not health.is_doubtful
    health.failed()
    now += QUEUE_DOUBT_S - 1
    assert health.is_doubtful
    now += 1
    assert not health.is_doubtful


def test_in_doubt_one_tries_now_and_then() -> None:
    now = 100.0
    health = QueueHealth(lambda: now)
    assert health.may_try() and health.may_try()
    health.failed()
    now += TRIAL_PERIOD_S
    assert [health.may_try() for _ in range(3)] == [True, False, False]
    now += TRIAL_PERIOD_S
    assert health.may_try()
    health.succeeded()
    assert health.may_try() and health.may_try()


async def test_a_stream_survives_an_outage_in_which_tokens_are_stored() -> None:
    async with running_router(says("abcdefghij" * 3, pause_s=0.01)) as router:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 40}
        running = asyncio.create_task(router.client.post("/v1/completions", json=body))
        await until(lambda: bool(router.worker.requests))
        # Only the router is cut off: what it misses stays in the log.
        for subscription in list(router.broker.subscriptions):
            if subscription.subject.startswith("tokens."):
                router.broker.subscriptions.remove(subscription)
                await asyncio.sleep(0.1)
                router.broker.subscriptions.append(subscription)
        assert (await running).json()["choices"][0]["text"] == "abcdefghij" * 3
