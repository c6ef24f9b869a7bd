"""The broker answers where it is told to, whoever may publish there. Nobody can have it speak for somebody else."""

import asyncio
import json
from collections.abc import Mapping

import pytest

from headrace_shared import subjects
from headrace_shared.api_keys import ApiKey
from headrace_shared.broker_permissions import Role
from headrace_shared.bus import Message
from headrace_shared.bus_rules import matcher
from headrace_shared.codec import decode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.messages import Lane, WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import ACCOUNTS, KEYS, LEASES, MODELS, REQUESTS, Queue, bucket_stream, bucket_subject
from tests.integration.deployment import until
from tests.security.conftest import As

pytestmark = pytest.mark.nats

QUEUE = Queue("m", Lane.INTERACTIVE)
VICTIM = WorkerId("worker-2")


FORGED = b"forged"
KV_MODELS = bucket_stream(MODELS.name)


def means_something(data: bytes) -> bool:
    """Answers of the interface are JSON, and no messages of ours."""
    return not data.startswith(b'{"type":"io.nats.jetstream.api.')


async def ask_there(bus: NatsBus, call: str, body: Mapping[str, object], answer_to: str) -> None:
    await bus._store.send(f"$JS.API.{call}", json.dumps(body).encode(), None, answer_to)
    await bus._store.echo()


async def listening(bus: NatsBus, subject: str) -> list[Message]:
    heard: list[Message] = []
    await bus.subscribe(subject, heard.append)
    return heard


HOW = [("DIRECT.GET", {}), ("DIRECT.GET", {"no_hdr": True}), ("STREAM.MSG.GET", {})]
"""With `no_hdr` nothing tells that an answer is one: who may write somewhere may not read it directly."""


@pytest.mark.parametrize(("call", "how"), HOW)
async def test_what_a_worker_has_stored_is_not_taken_for_a_grant(
    bus_of: As, call: str, how: Mapping[str, object]
) -> None:
    worker, other, scheduler = [await bus_of(role) for role in (Role.WORKER, Role.WORKER, Role.SCHEDULER)]
    subject = subjects.grants_subject(VICTIM)
    heard = await listening(other, subject)
    await worker.put(MODELS.name, "m.0", FORGED)
    await ask_there(worker, f"{call}.{KV_MODELS}", {"last_by_subj": "$KV.MODELS.m.0", **how}, subject)
    scheduler.publish(subject, b"true")
    await until(lambda: b"true" in [message.data for message in heard])
    await asyncio.sleep(0.2)
    assert [message.data for message in heard if means_something(message.data)] == [b"true"]


@pytest.mark.parametrize(("call", "how"), HOW)
async def test_nor_for_a_request(bus_of: As, call: str, how: Mapping[str, object]) -> None:
    worker, router, scheduler = [await bus_of(role) for role in (Role.WORKER, Role.ROUTER, Role.SCHEDULER)]
    await scheduler.ensure_consumer(QUEUE.consumer)
    await worker.put(MODELS.name, "m.0", FORGED)
    ask = {"last_by_subj": "$KV.MODELS.m.0", **how}
    await ask_there(worker, f"{call}.{KV_MODELS}", ask, QUEUE.subject)
    await router.enqueue(QUEUE.subject, b"true", message_id="1")
    pulled: list[bytes] = []
    while (delivery := await scheduler.pull(QUEUE.consumer, 10.0 if b"true" not in pulled else 0.5)) is not None:
        pulled.append(delivery.data)
        await scheduler.acknowledge(delivery.ack_subject)
    assert [data for data in pulled if means_something(data)] == [b"true"]
    await asyncio.sleep(0.2)
    assert await scheduler.num_messages(REQUESTS) == 0, "what was forged is gone for good"


async def test_nor_for_a_call_of_the_brokers_own_interface(bus_of: As) -> None:
    """An answer without a body would do as one: that nothing was found, say."""
    router, scheduler, operator = [await bus_of(role) for role in (Role.ROUTER, Role.SCHEDULER, Role.OPERATOR)]
    readers = [(Role.WORKER, MODELS, "m.0"), (Role.AUTOSCALER, LEASES, subjects.AUTOSCALER_LEASE)]
    tempted = [(await bus_of(role), bucket, key) for role, bucket, key in readers]
    await scheduler.ensure_consumer(QUEUE.consumer)
    await operator.create(KEYS.name, "k", b"true")
    await router.enqueue(QUEUE.subject, b"true", message_id="1")
    for target in (
        "STREAM.MSG.DELETE.REQUESTS",
        "STREAM.PURGE.REQUESTS",
        "STREAM.PURGE.KV_KEYS",
        f"CONSUMER.DELETE.REQUESTS.{QUEUE.consumer.name}",
        "STREAM.DELETE.REQUESTS",
    ):
        there = f"$JS.API.{target}"
        for bus, bucket, key in tempted:
            stream = bucket_stream(bucket.name)
            for call in ("DIRECT.GET", "STREAM.MSG.GET"):
                await ask_there(bus, f"{call}.{stream}", {"seq": 999}, there)
                await ask_there(bus, f"{call}.{stream}", {"last_by_subj": bucket_subject(bucket.name, "none")}, there)
            await ask_there(bus, f"STREAM.INFO.{stream}", {}, there)
            await bus._store.send(bucket_subject(bucket.name, key), b"forged", None, there)
            await bus._store.echo()
    await asyncio.sleep(0.3)
    assert await scheduler.num_messages(REQUESTS) == 1
    assert set(await scheduler.queue_depths(REQUESTS)) == {QUEUE.consumer.name}
    assert await operator.get(KEYS.name, "k") is not None


async def test_the_writer_of_one_key_cannot_empty_a_bucket(bus_of: As) -> None:
    """By a header that says that his value replaces all."""
    scheduler, autoscaler = [await bus_of(role) for role in (Role.SCHEDULER, Role.AUTOSCALER)]
    key = subjects.worker_lease_key(VICTIM)
    await scheduler.put(LEASES.name, key, b"true")
    subject = bucket_subject(LEASES.name, subjects.AUTOSCALER_LEASE)
    for which in ("all", "sub"):
        with pytest.raises(BusError):
            await autoscaler._streams.publish(subject, b"true", {"Nats-Rollup": which})
    entry = await scheduler.get(LEASES.name, key)
    assert entry is not None and entry.value == b"true"


async def test_a_consumer_that_delivers_to_somebody_else_is_not_heard(bus_of: As) -> None:
    router, worker, scheduler = [await bus_of(role) for role in (Role.ROUTER, Role.WORKER, Role.SCHEDULER)]
    subject = subjects.commands_subject(VICTIM)
    heard = await listening(worker, subject)
    await scheduler.ensure_consumer(QUEUE.consumer)
    await router.put(ACCOUNTS.name, "k", b"forged")
    stream = bucket_stream(ACCOUNTS.name)
    for name, target in (("a", subject), ("b", QUEUE.subject)):
        config: dict[str, object] = {
            "name": name,
            "deliver_subject": target,
            "deliver_policy": "all",
            "ack_policy": "none",
        }
        config |= {"replay_policy": "instant", "max_deliver": 1}
        await ask_there(
            router,
            f"CONSUMER.CREATE.{stream}.{name}",
            {"stream_name": stream, "config": config, "action": "create"},
            router._store._inbox + "x",
        )
    operator = await bus_of(Role.OPERATOR)
    operator.publish(subject, b"true")
    await until(lambda: heard)
    await asyncio.sleep(0.2)
    assert [message.data for message in heard] == [b"true"]
    assert await scheduler.pull(QUEUE.consumer, 0.5) is None


@pytest.mark.parametrize(("call", "how"), HOW)
async def test_nor_for_somebodys_value_in_a_bucket(bus_of: As, call: str, how: Mapping[str, object]) -> None:
    """A lease that a worker would like to have, and an API key."""
    worker, router, operator = [await bus_of(role) for role in (Role.WORKER, Role.ROUTER, Role.OPERATOR)]
    seen: list[tuple[str, bytes | None]] = []
    await router.watch(KEYS.name, lambda entry, key: seen.append((key, None if entry is None else entry.value)))
    await operator.create(KEYS.name, "true", b"true")
    await worker.put(MODELS.name, "m.0", FORGED)
    ask = {"last_by_subj": "$KV.MODELS.m.0", **how}
    for key in ("forged", "true"):
        await ask_there(worker, f"{call}.{KV_MODELS}", ask, f"$KV.KEYS.{key}")
    await operator.create(KEYS.name, "last", b"last")
    await until(lambda: ("last", b"last") in seen)
    assert [told for told in seen if means_something(told[1] or b"")] == [("true", b"true"), ("last", b"last")]
    for _, value in seen:
        if value is not None and not means_something(value):
            with pytest.raises(ProtocolError):
                decode(value, ApiKey)


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
