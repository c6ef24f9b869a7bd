"""The broker answers where it is told to, whoever may publish there. Nobody can have it speak for somebody else."""

import asyncio

import pytest

from headrace_shared import subjects
from headrace_shared.broker_permissions import RIGHTS, Role
from headrace_shared.bus import Message
from headrace_shared.bus_rules import matcher
from headrace_shared.codec import decode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.leases import LEASE_TTL_S, Leases
from headrace_shared.messages import Lane, WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import KEYS, LEASES, REQUESTS, Queue, bucket_stream, bucket_subject
from tests.integration.deployment import until
from tests.security.attackers import attackers
from tests.security.conftest import PATIENT_S, As
from tests.security.operations import EVERY_STREAM
from tests.shared.samples import SAMPLES

pytestmark = pytest.mark.nats

QUEUE = Queue("m", Lane.INTERACTIVE)
VICTIM = WorkerId("worker-2")
KINDS = {type(sample) for sample in SAMPLES.values()}


def means_something(data: bytes) -> bool:
    """To any of our services."""
    for kind in KINDS:
        try:
            decode(data, kind)
        except ProtocolError:
            continue
        return True
    return False


async def settle(scheduler: NatsBus) -> None:
    """The broker has answered what was asked before, and the answers have done what they can."""
    await scheduler._streams.api("STREAM.MSG.GET.REQUESTS", {"seq": 1})
    await asyncio.sleep(0.5)


def concrete(pattern: str) -> str:
    return pattern.replace("*", "x")


async def test_nobody_can_have_the_broker_say_anything_to_a_service(bus_of: As) -> None:
    """On no subject that anybody listens to: commands, grants, tokens, progress, signs of life."""
    victims = {role: await bus_of(role, PATIENT_S) for role in Role}
    heard: dict[tuple[Role, str], list[Message]] = {}
    for role, rights in RIGHTS.items():
        for pattern in rights.hears:
            messages = heard.setdefault((role, concrete(pattern)), [])
            await victims[role].subscribe(concrete(pattern), messages.append)
    # As they come, before anything is dropped: else nothing may have come at all.
    raw: list[bytes] = []
    for role, where in heard:
        await victims[role]._core.listen(where, lambda message: raw.append(message.data))
    for attacker in await attackers(bus_of):
        for where in {where for _, where in heard}:
            await attacker.have_it_said(where)
        await attacker.have_it_said(subjects.grants_subject(VICTIM))
    await settle(victims[Role.SCHEDULER])
    assert len(heard) > 15 and any(data.startswith(b'{"type":"io.nats.jetstream.api.v1.stream_msg_get') for data in raw)
    assert [message for messages in heard.values() for message in messages if means_something(message.data)] == []
    assert all(data.startswith(b'{"') for data in raw), "never what was stored, and never nothing"


async def test_nor_a_request(bus_of: As) -> None:
    router, scheduler = [await bus_of(role, PATIENT_S) for role in (Role.ROUTER, Role.SCHEDULER)]
    await scheduler.ensure_consumer(QUEUE.consumer)
    for attacker in await attackers(bus_of):
        await attacker.have_it_said(QUEUE.subject)
    await router.enqueue(QUEUE.subject, b"true", message_id="1")
    pulled: list[bytes] = []
    while (delivery := await scheduler.pull(QUEUE.consumer, 10.0 if b"true" not in pulled else 0.5)) is not None:
        pulled.append(delivery.data)
        await scheduler.acknowledge(delivery.ack_subject)
    assert len(pulled) > 10 and all(data.startswith(b'{"') for data in pulled if data != b"true")
    assert not any(map(means_something, pulled))
    await asyncio.sleep(0.2)
    assert await scheduler.num_messages(REQUESTS) == 0, "what was forged is gone for good"


CALLS = (
    *(f"STREAM.{call}.REQUESTS" for call in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE", "SNAPSHOT", "RESTORE")),
    *(
        f"STREAM.{call}.KV_KEYS"
        for call in ("DELETE", "PURGE", "UPDATE", "MSG.DELETE", "LEADER.STEPDOWN", "PEER.REMOVE")
    ),
    *(f"CONSUMER.{call}.REQUESTS.{QUEUE.consumer.name}" for call in ("DELETE", "PAUSE", "RESET", "UNPIN", "MSG.NEXT")),
    *(f"CONSUMER.{call}.REQUESTS.new" for call in ("CREATE", "DURABLE.CREATE")),
    *("CONSUMER.CREATE.KV_KEYS", "CONSUMER.CREATE.KV_KEYS.new", "STREAM.CREATE.NEW"),
    *("STREAM.DELETE.OBJ_FILES", "STREAM.PURGE.OBJ_FILES", "STREAM.PURGE.BATCH_RESULTS", "STREAM.DELETE.TOKENS"),
)


async def test_nor_a_call_of_the_brokers_own_interface(bus_of: As) -> None:
    """An answer without a body would do as one: that nothing was found, say."""
    router, scheduler, operator = [
        await bus_of(role, PATIENT_S) for role in (Role.ROUTER, Role.SCHEDULER, Role.OPERATOR)
    ]
    them = await attackers(bus_of)
    await scheduler.ensure_consumer(QUEUE.consumer)
    await operator.create(KEYS.name, "k", b"true")
    await router.enqueue(QUEUE.subject, b"true", message_id="1")
    for stream, subject in (("OBJ_FILES", "$O.FILES.C.x"), ("BATCH_RESULTS", "batchresults.x")):
        await router.enqueue(subject, b"true", message_id=stream)

    async def state() -> dict[str, object]:
        found: dict[str, object] = {}
        for stream in EVERY_STREAM:
            info = await scheduler._streams.must(f"STREAM.INFO.{stream}")
            found[stream] = (info["created"], info["config"], info["state"]["consumer_count"])
        for stream in ("REQUESTS", "KV_KEYS", "OBJ_FILES", "BATCH_RESULTS"):
            found[f"{stream}'s"] = await scheduler.num_messages(stream)
        consumer = await scheduler._streams.must(f"CONSUMER.INFO.REQUESTS.{QUEUE.consumer.name}")
        found["consumer"] = {key: consumer.get(key) for key in ("created", "config", "num_pending", "num_ack_pending")}
        found["paused"] = consumer.get("paused", False)
        return found

    before = await state()
    for attacker in them:
        for call in CALLS:
            await attacker.have_it_said(f"$JS.API.{call}")
    await settle(scheduler)
    assert await state() == before
    assert await operator.get(KEYS.name, "k") is not None
    delivery = await scheduler.pull(QUEUE.consumer, 5.0)
    assert delivery is not None and (delivery.data, delivery.num_delivered) == (b"true", 1)


async def test_nor_a_value_of_somebodys_in_a_bucket(bus_of: As) -> None:
    """They can have it overwritten, but by nothing that means anything. Leases can be taken again."""
    router, scheduler, operator = [
        await bus_of(role, PATIENT_S) for role in (Role.ROUTER, Role.SCHEDULER, Role.OPERATOR)
    ]
    seen: list[tuple[str, bytes | None]] = []
    await router.watch(KEYS.name, lambda entry, key: seen.append((key, None if entry is None else entry.value)))
    clock = [100.0]
    leases = Leases(scheduler, LEASES.name, "scheduler-1", lambda: clock[0])
    await leases.open()
    lease_key = subjects.worker_lease_key(VICTIM)
    first = await leases.acquire(lease_key)
    await operator.create(KEYS.name, "true", b"true")
    for attacker in await attackers(bus_of):
        for key in ("forged", "true"):
            for of in (bucket_subject, subjects.stored_subject):
                await attacker.have_it_said(of(KEYS.name, key))
        await attacker.have_it_said(bucket_subject(LEASES.name, lease_key))
    await operator.create(KEYS.name, "last", b"last")
    await until(lambda: ("last", b"last") in seen, timeout_s=PATIENT_S)
    values = [value for key, value in seen if value not in (b"true", b"last")]
    assert len(values) > 10 and all(value is not None and value.startswith(b'{"') for value in values)
    assert not any(means_something(value) for value in values if value is not None)
    assert {key for key, _ in seen} == {"forged", "true", "last"}, "what the broker tells of is what it has stored"
    clock[0] += LEASE_TTL_S
    entry = await scheduler.get(LEASES.name, lease_key)
    assert entry is not None and not means_something(entry.value)
    await until(
        lambda: (known := leases.observed(lease_key)) is not None and known.revision == entry.revision, PATIENT_S
    )
    second = await leases.acquire(lease_key)
    assert first is not None and second is not None and second.epoch == first.epoch + 1


async def test_the_writer_of_one_key_cannot_empty_a_bucket(bus_of: As) -> None:
    """By a header that says that his value replaces all."""
    scheduler, autoscaler = [await bus_of(role, PATIENT_S) for role in (Role.SCHEDULER, Role.AUTOSCALER)]
    key = subjects.worker_lease_key(VICTIM)
    await scheduler.put(LEASES.name, key, b"true")
    subject = bucket_subject(LEASES.name, subjects.AUTOSCALER_LEASE)
    for which in ("all", "sub"):
        with pytest.raises(BusError):
            await autoscaler._streams.publish(subject, b"true", {"Nats-Rollup": which})
    entry = await scheduler.get(LEASES.name, key)
    assert entry is not None and entry.value == b"true"


async def test_even_a_scheduler_cannot_have_a_stream_speak_for_an_operator(bus_of: As) -> None:
    """It may have consumers deliver anywhere, and read directly, but what comes so is known by its header."""
    scheduler, worker, operator = [
        await bus_of(role, PATIENT_S) for role in (Role.SCHEDULER, Role.WORKER, Role.OPERATOR)
    ]
    subject = subjects.commands_subject(VICTIM)
    heard: list[Message] = []
    await worker.subscribe(subject, heard.append)
    await scheduler.put(LEASES.name, subjects.worker_lease_key(VICTIM), b"stored")
    stream = bucket_stream(LEASES.name)
    which = b'{"last_by_subj": "%s"}' % bucket_subject(LEASES.name, subjects.worker_lease_key(VICTIM)).encode()
    scheduler._store.send(f"$JS.API.DIRECT.GET.{stream}", which, None, subject)
    await scheduler._store.echo()
    operator.publish(subject, b"true")
    await until(lambda: heard)
    await asyncio.sleep(0.2)
    assert [message.data for message in heard] == [b"true"]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("grants.w", ["grants.w"], ["grants.x", "$KV.MODELS.m.0", "grants.w.x"]),
        ("tokens.r.*", ["tokens.r.1"], ["tokens.r", "tokens.s.1", "tokens.r.1.2", "tokensXr.1"]),
        ("telemetry.*.*", ["telemetry.a.b"], ["telemetry.a", "telemetry.a.b.c"]),
        ("$KV.KEYS.>", ["$KV.KEYS.a", "$KV.KEYS.a.b"], ["$KV.KEYS", "xKV.KEYS.a"]),
    ],
)
def test_patterns_mean_what_the_broker_means(pattern: str, yes: list[str], no: list[str]) -> None:
    is_meant = matcher(pattern)
    assert all(map(is_meant, yes)) and not any(map(is_meant, no))
