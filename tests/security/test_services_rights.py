"""With nothing but its own user each service can do what it is there for, and not what others are there for."""

import asyncio

import pytest

from headrace_shared import subjects
from headrace_shared.broker_permissions import Role
from headrace_shared.bus import Entry, Message
from headrace_shared.errors import BusUnavailable, OutcomeUnknown
from headrace_shared.messages import Lane, RequestId, RouterId, SchedulerId, WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import (
    ACCOUNTS,
    CANCELS,
    DEAD,
    FLIGHT,
    GROUPS,
    KEYS,
    LEASES,
    MODELS,
    REQUESTS,
    TOKENS,
    Queue,
)
from tests.integration.deployment import until
from tests.security.conftest import As

pytestmark = pytest.mark.nats

QUEUE = Queue("m", Lane.INTERACTIVE)
REQUEST = RequestId("0123456789abcdef0123456789abcdef")
ROUTER, SCHEDULER, WORKER = RouterId("router-1"), SchedulerId("scheduler-1"), WorkerId("worker-1")
TOKENS_SUBJECT = subjects.tokens_subject(ROUTER, REQUEST)


async def hears(bus: NatsBus, subject: str) -> list[Message]:
    heard: list[Message] = []
    await bus.subscribe(subject, heard.append)
    return heard


async def test_a_request_goes_all_the_way(bus_of: As) -> None:
    router, scheduler, worker = [await bus_of(role) for role in (Role.ROUTER, Role.SCHEDULER, Role.WORKER)]
    told = await hears(router, subjects.all_tokens_of(ROUTER))
    granted = await hears(worker, subjects.grants_subject(WORKER))
    progress = await hears(scheduler, subjects.progress_subject(SCHEDULER))
    await scheduler.ensure_consumer(QUEUE.consumer)
    first = await router.enqueue(QUEUE.subject, b"request", message_id="1")
    dropped = await router.enqueue(QUEUE.subject, b"cancelled", message_id="2")
    delivery = await scheduler.pull(QUEUE.consumer, 5.0)
    assert delivery is not None and (delivery.data, delivery.stream_sequence) == (b"request", first)
    scheduler.in_progress(delivery.ack_subject)
    scheduler.publish(subjects.grants_subject(WORKER), b"grant")
    await until(lambda: granted)
    worker.publish(TOKENS_SUBJECT, b"frame")
    worker.publish(subjects.progress_subject(SCHEDULER), b"progress")
    await until(lambda: told and progress)
    await scheduler.enqueue(TOKENS_SUBJECT, b"ended", message_id="ended")
    await scheduler.acknowledge(delivery.ack_subject)
    assert not await router.holds(REQUESTS, first)
    assert await router.holds(REQUESTS, dropped) and await router.delete(REQUESTS, dropped)
    assert [message.data for message in await router.read(TOKENS.name, TOKENS_SUBJECT, 10)] == [b"frame", b"ended"]
    assert (await router.queue_depths(REQUESTS))[QUEUE.consumer.name].num_pending == 0
    await router.enqueue(subjects.cancel_subject(REQUEST), b"cancel", message_id="cancel")
    assert len(await scheduler.read(CANCELS.name, subjects.cancel_subject(REQUEST), 10)) == 1
    # Given back, it comes again.
    await router.enqueue(QUEUE.subject, b"again", message_id="3")
    for _ in range(2):
        again = await scheduler.pull(QUEUE.consumer, 5.0)
        assert again is not None and again.data == b"again"
        scheduler.give_back(again.ack_subject)


async def test_buckets_are_read_written_and_watched_by_whom_they_are_for(bus_of: As) -> None:
    router, scheduler, worker, autoscaler, operator = [
        await bus_of(role) for role in (Role.ROUTER, Role.SCHEDULER, Role.WORKER, Role.AUTOSCALER, Role.OPERATOR)
    ]
    seen: dict[str, list[tuple[str, bytes | None]]] = {}

    async def watch(bus: NatsBus, bucket: str) -> list[tuple[str, bytes | None]]:
        found = seen.setdefault(bucket, [])

        def on_change(entry: Entry | None, key: str) -> None:
            found.append((key, None if entry is None else entry.value))

        await bus.watch(bucket, on_change)
        return found

    keys = await watch(router, KEYS.name)
    await operator.create(KEYS.name, "k", b"key")
    await until(lambda: keys == [("k", b"key")])
    await operator.remove(KEYS.name, "k")
    await until(lambda: keys[1:] == [("k", None)])
    cards = await watch(router, MODELS.name)
    await worker.put(MODELS.name, subjects.model_card_key("m", 0), b"card")
    await until(lambda: cards == [("m.0", b"card")])
    assert (await router.get(MODELS.name, "m.0")) is not None
    places = await watch(worker, GROUPS.name)
    revision = await worker.create(GROUPS.name, subjects.group_key("g", 1), b"here")
    await worker.update(GROUPS.name, subjects.group_key("g", 1), b"still", revision)
    await until(lambda: places and places[-1] == ("g.1", b"still"))
    await worker.remove(GROUPS.name, subjects.group_key("g", 1))
    await until(lambda: places[-1] == ("g.1", None))
    leases = await watch(autoscaler, LEASES.name)
    await autoscaler.create(LEASES.name, subjects.AUTOSCALER_LEASE, b"mine")
    await scheduler.create(LEASES.name, subjects.worker_lease_key(WORKER), b"mine")
    await until(lambda: len(leases) == 2)
    accounts = await watch(router, ACCOUNTS.name)
    await router.put(ACCOUNTS.name, "k", b"used")
    await until(lambda: accounts == [("k", b"used")])


async def test_commands_go_from_the_operator_to_the_worker_and_back(bus_of: As) -> None:
    worker, operator = await bus_of(Role.WORKER), await bus_of(Role.OPERATOR)
    commands = await hears(worker, subjects.commands_subject(WORKER))
    replies = await hears(operator, subjects.replies_subject("command-1"))
    operator.publish(subjects.commands_subject(WORKER), b"drain")
    await until(lambda: commands)
    worker.publish(subjects.replies_subject("command-1"), b"yes")
    await until(lambda: replies)
    for stream in (DEAD.name, FLIGHT.name, "KV_KEYS"):
        assert await operator.num_messages(stream) == 0
    assert await operator.read(FLIGHT.name, subjects.ALL_FLIGHTS, 10) == []


async def test_what_others_are_there_for_fails(bus_of: As) -> None:
    router, worker, autoscaler, scheduler = [
        await bus_of(role) for role in (Role.ROUTER, Role.WORKER, Role.AUTOSCALER, Role.SCHEDULER)
    ]
    await scheduler.ensure_consumer(QUEUE.consumer)
    sequence = await router.enqueue(QUEUE.subject, b"request", message_id="1")
    attempts = (
        worker.enqueue(QUEUE.subject, b"mine", message_id="2"),
        worker.read(TOKENS.name, "tokens.*.*", 1),
        worker.delete(REQUESTS, sequence),
        worker.put(KEYS.name, "k", b"key"),
        worker.put(LEASES.name, subjects.worker_lease_key(WORKER), b"mine"),
        router.pull(QUEUE.consumer, 1.0),
        router.put(KEYS.name, "k", b"key"),
        router.remove_consumer(REQUESTS, QUEUE.consumer.name),
        autoscaler.enqueue(QUEUE.subject, b"mine", message_id="3"),
        autoscaler.put(LEASES.name, subjects.worker_lease_key(WORKER), b"mine"),
    )
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        # None: a pull that brought nothing.
        assert result is None or isinstance(result, BusUnavailable | OutcomeUnknown), result
    assert await router.holds(REQUESTS, sequence)
    delivery = await scheduler.pull(QUEUE.consumer, 5.0)
    assert delivery is not None and delivery.data == b"request"
    with pytest.raises(OutcomeUnknown):
        await router._store.request(delivery.ack_subject, b"+ACK", timeout_s=0.5)
    assert await router.holds(REQUESTS, sequence), "only its owner can settle it"


async def test_streams_are_waited_for_by_those_who_may_not_make_them(bus_of: As) -> None:
    for role in (Role.ROUTER, Role.WORKER, Role.AUTOSCALER):
        bus = await bus_of(role)
        await bus.ensure_bucket({Role.ROUTER: KEYS, Role.WORKER: MODELS, Role.AUTOSCALER: LEASES}[role])
    worker, scheduler = await bus_of(Role.WORKER), await bus_of(Role.SCHEDULER)
    await worker.ensure_stream(TOKENS._replace(max_bytes=1))
    assert await scheduler.num_messages(TOKENS.name) == 0
    worker.publish(TOKENS_SUBJECT, b"x" * 1000)
    await asyncio.sleep(0.1)
    assert await scheduler.num_messages(TOKENS.name) == 1, "its limits are as they were made"
