"""What the broker is asked to keep: limits, one consumer a lane, and what it does with word from a former owner."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_shared import nats_bus
from headrace_shared.broker import NatsServer, find_nats_server
from headrace_shared.bus import Delivery
from headrace_shared.errors import BusUnavailable, QueueFull
from headrace_shared.messages import Lane
from headrace_shared.nats_bus import NatsBus
from headrace_shared.provisioning import missing, provision
from headrace_shared.subjects import (
    ACK_WAIT_S,
    CANCELS,
    DEDUPE_WINDOW_S,
    LEASES,
    MODELS,
    REQUESTS,
    TOKENS,
    ConsumerSpec,
    Queue,
    bucket_stream,
    former_consumer,
    requests_stream,
)
from tests.queues import lane_depth
from tests.shared.bus_helpers import CONSUMER, SUBJECT, Connect, until

pytestmark = pytest.mark.nats

NS = 10**9
QUICK = CONSUMER._replace(ack_wait_s=0.5)


async def info_of(bus: NatsBus, stream: str) -> dict[str, Any]:
    return await bus._streams.must(f"STREAM.INFO.{stream}")


@pytest.fixture
async def product_bus(connect: Connect) -> AsyncIterator[NatsBus]:
    """With everything that the services make."""
    bus = await connect()
    for stream in (requests_stream(3, 1024), TOKENS, CANCELS):
        await bus.ensure_stream(stream)
    for bucket in (LEASES, MODELS):
        await bus.ensure_bucket(bucket)
    yield bus


# Streams.


async def test_every_stream_is_bounded_and_its_dedupe_window_is_short(product_bus: NatsBus) -> None:
    names = ["REQUESTS", TOKENS.name, CANCELS.name, bucket_stream(LEASES.name), bucket_stream(MODELS.name)]
    for name in names:
        config = (await info_of(product_bus, name))["config"]
        assert 0 < config["max_bytes"] <= 1 << 30, name
        assert 0 < config["duplicate_window"] <= DEDUPE_WINDOW_S * NS, name
    assert (await product_bus._streams.must("STREAM.NAMES"))["total"] == len(names)


async def test_streams_and_buckets_that_are_gone_are_found_and_made_again(connect: Connect) -> None:
    bus = await connect()
    queue = requests_stream(10, 1 << 20)
    await provision(bus, queue)
    assert await missing(bus) == []
    gone = ["REQUESTS", TOKENS.name, bucket_stream(LEASES.name)]
    for name in gone:
        await bus._streams.must(f"STREAM.DELETE.{name}")
    assert await missing(bus) == gone
    await provision(bus, queue)
    assert await missing(bus) == []


async def test_a_bucket_that_an_earlier_version_made_is_as_it_is_made_now(connect: Connect) -> None:
    """It could be emptied by a header of one value, and did not tell what it had stored."""
    bus = await connect()
    name = bucket_stream(MODELS.name)
    await bus.ensure_bucket(MODELS)
    config = (await info_of(bus, name))["config"]
    await bus._streams.must(f"STREAM.DELETE.{name}")
    former = config | {"allow_direct": False, "allow_rollup_hdrs": True, "deny_purge": False, "republish": None}
    await bus._streams.must(f"STREAM.CREATE.{name}", former)
    assert "republish" not in (await info_of(bus, name))["config"]
    await bus.put(MODELS.name, "m.0", b"x")
    await bus.ensure_bucket(MODELS)
    assert (await info_of(bus, name))["config"] == config
    seen: list[bytes | None] = []
    await bus.watch(MODELS.name, lambda entry, key: seen.append(None if entry is None else entry.value))
    await bus.put(MODELS.name, "m.0", b"y")
    await until(lambda: seen == [b"x", b"y"])
    assert [found.key for found in await bus.entries(MODELS.name)] == ["m.0"]


async def test_the_queue_is_on_disk_and_refuses_when_full_instead_of_dropping(product_bus: NatsBus) -> None:
    config = (await info_of(product_bus, "REQUESTS"))["config"]
    wanted = {"retention": "workqueue", "discard": "new", "storage": "file", "max_msgs": 3, "max_bytes": 1024}
    assert {key: config[key] for key in wanted} == wanted
    assert not config.get("max_age")
    for number in range(3):
        await product_bus.enqueue(SUBJECT, b"", message_id=str(number))
    with pytest.raises(QueueFull):
        await product_bus.enqueue(SUBJECT, b"", message_id="one more")
    state = (await info_of(product_bus, "REQUESTS"))["state"]
    assert (state["messages"], state["last_seq"] - state["first_seq"]) == (3, 2)


async def test_tokens_are_never_written_to_disk(product_bus: NatsBus) -> None:
    for spec in (TOKENS, CANCELS):
        config = (await info_of(product_bus, spec.name))["config"]
        assert config["storage"] == "memory" and 0 < config["max_age"] <= 3600 * NS


# Consumers.


async def test_every_queue_has_one_consumer_and_gets_only_its_own(bus: NatsBus) -> None:
    models = ["m", "m.n", "m.*", "m.>", "m n", "org/m", "mé", "M", "m-interactive", "x" * 300]
    queues = [Queue(model, lane) for model in models for lane in Lane]
    queues += [Queue("m", Lane.INTERACTIVE, flow, partition) for flow in (0, 1, 32) for partition in (1, 3)]
    await bus.remove_consumer(REQUESTS, former_consumer("m", Lane.INTERACTIVE))  # it had the whole lane
    for queue in queues:
        await bus.ensure_consumer(queue.consumer)
    for queue in queues:
        for number in range(2):
            await bus.enqueue(queue.subject, queue.subject.encode(), message_id=f"{queue.subject}{number}")
    depths = await bus.queue_depths(REQUESTS)
    assert depths == {queue.consumer.name: (2, 0, 0) for queue in queues}
    assert await lane_depth(bus, "m", Lane.INTERACTIVE) == (14, 0, 0)
    for queue in queues:
        for _ in range(2):
            delivery = await bus.pull(queue.consumer, 5.0)
            assert delivery is not None and delivery.data == queue.subject.encode()
    with pytest.raises(BusUnavailable, match="unique"):
        await bus.ensure_consumer(ConsumerSpec("REQUESTS", "greedy", "requests.m.>", 1.0, 1))
    assert (await info_of(bus, "REQUESTS"))["state"]["consumer_count"] == len(queues)


async def test_a_consumer_offers_again_soon_and_without_end(bus: NatsBus) -> None:
    """A limit of deliveries would leave a message in the queue that nobody is ever offered: we count ourselves."""
    spec = Queue("m", Lane.BATCH).consumer
    await bus.ensure_consumer(spec)
    config = (await bus._streams.must(f"CONSUMER.INFO.REQUESTS.{spec.name}"))["config"]
    wanted = {
        "durable_name": "m-batch-0",
        "ack_policy": "explicit",
        "ack_wait": 4 * NS,
        "max_deliver": -1,
        "filter_subject": "requests.m.batch.0",
        "max_ack_pending": spec.max_ack_pending,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert ACK_WAIT_S == 4.0 and "backoff" not in config and not config.get("inactive_threshold")


async def test_pulls_and_processes_that_come_and_go_leave_no_consumer_and_no_subscription(
    bus: NatsBus, connect: Connect, nats_server: NatsServer
) -> None:
    async def counts() -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=nats_server.monitor_url) as client:
            connections = (await client.get("/connz")).json()["connections"]
            consumers = (await client.get("/jsz")).json()["consumers"]
        return consumers, sum(each["subscriptions"] for each in connections)

    async def work(number: int) -> None:
        await bus.enqueue(SUBJECT, b"", message_id=str(number))
        delivery = await bus.pull(CONSUMER, 5.0)
        assert delivery is not None
        await bus.acknowledge(delivery.ack_subject)
        await bus.read("REQUESTS", SUBJECT, 10)

    await work(-1)
    before = await counts()
    for number in range(100):
        await work(number)
    for _ in range(5):
        visitor = await connect()
        await visitor.ensure_consumer(CONSUMER)
        watch = await visitor.watch("B", lambda entry, key: None)
        await watch.close()
        await visitor.close()
    async with asyncio.timeout(30.0):
        while await counts() != before:  # noqa: ASYNC110 - the broker counts a moment later
            await asyncio.sleep(0.05)


# Word from a former owner.


@pytest.fixture
async def owners(bus: NatsBus) -> tuple[Delivery, Delivery]:
    """One message as its former owner knows it, and as its present one does."""
    await bus.ensure_consumer(QUICK)
    await bus.enqueue(SUBJECT, b"work", message_id="1")
    former = await bus.pull(QUICK, 5.0)
    present = await bus.pull(QUICK, 5.0)
    assert former is not None and present is not None
    assert (former.num_delivered, present.num_delivered) == (1, 2)
    assert former.stream_sequence == present.stream_sequence
    await bus.ensure_consumer(CONSUMER)
    return former, present


async def test_the_broker_does_not_fence_acknowledgements(bus: NatsBus, owners: tuple[Delivery, Delivery]) -> None:
    """So only who has told the end of a request may acknowledge it: then nobody needs the message any more."""
    former, present = owners
    await bus.acknowledge(former.ack_subject)
    assert await bus.num_messages("REQUESTS") == 0
    await bus.acknowledge(present.ack_subject)


async def test_the_broker_does_not_fence_giving_back(bus: NatsBus, owners: tuple[Delivery, Delivery]) -> None:
    """So whoever may have lost a message must not give it back: a third would get it while the second works on it."""
    former, _ = owners
    bus.give_back(former.ack_subject)
    third = await bus.pull(CONSUMER, 5.0)
    assert third is not None and third.num_delivered == 3


@pytest.mark.parametrize("wait_s", [0.2, 1.5])
async def test_a_process_that_was_frozen_does_not_give_back_what_another_owns_by_now(
    bus: NatsBus, nats_server: NatsServer, wait_s: float
) -> None:
    """A message reached its socket just as it froze."""
    await bus.ensure_consumer(QUICK)

    async def successor() -> tuple[Delivery | None, Delivery | None]:
        other = await NatsBus.connect(nats_server.url, name="other", on_closed=lambda: None)
        await other.enqueue(SUBJECT, b"", message_id="1")
        await asyncio.sleep(0.1)
        offered = await other.pull(QUICK, 5.0)
        await other.ensure_consumer(CONSUMER)
        is_owned.set()
        again = await other.pull(QUICK, 2.0)
        await other.close()
        return offered, again

    is_owned = threading.Event()
    pull = asyncio.create_task(bus.pull(QUICK, wait_s))
    await asyncio.sleep(0.1)
    with ThreadPoolExecutor() as pool:
        successors = pool.submit(lambda: asyncio.run(successor()))
        assert is_owned.wait(10.0)  # blocks this thread's loop
        time.sleep(0.3)  # noqa: ASYNC251 - until every time limit of the pull has passed
        assert await pull is None
        offered, again = await asyncio.wrap_future(successors)
    assert offered is not None and offered.num_delivered == 2
    assert again is None


# A broker that lacks something.


async def test_a_broker_without_streams_is_told_from_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own health check says that all is well, so the first stream is what tells."""
    monkeypatch.setattr(nats_bus, "PATIENCE_S", 0.5)
    process = await asyncio.create_subprocess_exec(
        *(str(find_nats_server()), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", str(tmp_path)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        ports = tmp_path / f"{find_nats_server().name}_{process.pid}.ports"
        async with asyncio.timeout(30.0):
            while not ports.exists() or not ports.read_text().rstrip().endswith("}"):  # noqa: ASYNC110 - a process's file
                await asyncio.sleep(0.02)
        bus = await NatsBus.connect(json.loads(ports.read_text())["nats"][0], name="test", on_closed=lambda: None)
        with pytest.raises(BusUnavailable, match="JetStream"):
            await bus.ensure_stream(TOKENS)
        assert bus.is_connected
        await bus.close()
    finally:
        process.kill()
        await process.wait()
