"""The broker answers where it is told to, whoever may publish there. Nobody can have it speak for somebody else."""

import asyncio
import json
from collections.abc import Mapping

import pytest

from headrace_shared import subjects
from headrace_shared.broker_permissions import Role
from headrace_shared.bus import Message
from headrace_shared.bus_rules import matcher
from headrace_shared.messages import Lane, WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import ACCOUNTS, KEYS, MODELS, REQUESTS, Queue, bucket_stream
from tests.integration.deployment import until
from tests.security.conftest import As

pytestmark = pytest.mark.nats

QUEUE = Queue("m", Lane.INTERACTIVE)
VICTIM = WorkerId("worker-2")


async def ask_there(bus: NatsBus, call: str, body: Mapping[str, object], answer_to: str) -> None:
    await bus._store.send(f"$JS.API.{call}", json.dumps(body).encode(), None, answer_to)
    await bus._store.echo()


async def listening(bus: NatsBus, subject: str) -> list[Message]:
    heard: list[Message] = []
    await bus.subscribe(subject, heard.append)
    return heard


async def test_what_a_worker_has_stored_is_not_taken_for_a_grant(bus_of: As) -> None:
    worker, other, scheduler = [await bus_of(role) for role in (Role.WORKER, Role.WORKER, Role.SCHEDULER)]
    subject = subjects.grants_subject(VICTIM)
    heard = await listening(other, subject)
    await worker.put(MODELS.name, "m.0", b"forged")
    ask = {"last_by_subj": "$KV.MODELS.m.0"}
    await ask_there(worker, f"DIRECT.GET.{bucket_stream(MODELS.name)}", ask, subject)
    scheduler.publish(subject, b"true")
    await until(lambda: heard)
    await asyncio.sleep(0.2)
    assert [message.data for message in heard] == [b"true"]


async def test_nor_for_a_request(bus_of: As) -> None:
    worker, router, scheduler = [await bus_of(role) for role in (Role.WORKER, Role.ROUTER, Role.SCHEDULER)]
    await scheduler.ensure_consumer(QUEUE.consumer)
    await worker.put(MODELS.name, "m.0", b"forged")
    ask = {"last_by_subj": "$KV.MODELS.m.0"}
    await ask_there(worker, f"DIRECT.GET.{bucket_stream(MODELS.name)}", ask, QUEUE.subject)
    await router.enqueue(QUEUE.subject, b"true", message_id="1")
    delivery = await scheduler.pull(QUEUE.consumer, 10.0)
    assert delivery is not None and delivery.data == b"true"
    await scheduler.acknowledge(delivery.ack_subject)
    assert await scheduler.pull(QUEUE.consumer, 0.5) is None
    await asyncio.sleep(0.2)
    assert await scheduler.num_messages(REQUESTS) == 0, "the forged one is gone for good"


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


async def test_nor_for_somebodys_value_in_a_bucket(bus_of: As) -> None:
    """A lease that a worker would like to have, and an API key."""
    worker, router, operator = [await bus_of(role) for role in (Role.WORKER, Role.ROUTER, Role.OPERATOR)]
    seen: list[tuple[str, bytes | None]] = []
    await router.watch(KEYS.name, lambda entry, key: seen.append((key, None if entry is None else entry.value)))
    await operator.create(KEYS.name, "true", b"true")
    await worker.put(MODELS.name, "m.0", b"forged")
    ask = {"last_by_subj": "$KV.MODELS.m.0"}
    for key in ("forged", "true"):
        await ask_there(worker, f"DIRECT.GET.{bucket_stream(MODELS.name)}", ask, f"$KV.KEYS.{key}")
    await operator.create(KEYS.name, "last", b"last")
    await until(lambda: ("last", b"last") in seen)
    assert seen == [("true", b"true"), ("last", b"last")]


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
