"""Whoever may publish at the broker can send what is no message: it is refused, and nothing runs or dies of it."""

import asyncio
import json
import os
import pickle
from pathlib import Path
from random import Random

import httpx
import msgpack
import pytest

from headrace_shared.broker_permissions import Role, permissions_of
from headrace_shared.bus_rules import matcher
from headrace_shared.codec import encode
from headrace_shared.messages import Lane, RequestId, RouterId, SchedulerId, WorkerId
from headrace_shared.subjects import (
    ACCOUNTS,
    CALLS,
    GROUPS,
    KEYS,
    LEASES,
    LOSSES,
    MODELS,
    attached_subject,
    bucket_subject,
    cancel_subject,
    commands_subject,
    dead_subject,
    flight_subject,
    grants_subject,
    hello_subject,
    loads_subject,
    progress_subject,
    story_query_subject,
    story_subject,
    telemetry_subject,
    tokens_subject,
)
from tests.e2e.api import MODEL, WAYS, ask
from tests.e2e.attacks import lasting
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched
from tests.queues import request_subject
from tests.shared.samples import SAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]


class Touch:
    """Unpickled, it leaves a mark."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mknod, (str(self._path), 0o600)


def payloads(marker: Path) -> list[bytes]:
    random = Random(3)
    return [
        b"",
        pickle.dumps(Touch(marker)),
        random.randbytes(500),
        json.dumps({"type": "Request", "request_id": 7}).encode(),
        b'{"a":' * 20_000,
        b"\x91" * 50_000,
        msgpack.packb(msgpack.ExtType(5, pickle.dumps(Touch(marker)))),
        b"\xdf\xff\xff\xff\xff",
        encode(SAMPLES["Telemetry"]),
        encode(SAMPLES["Grant"])[:-3],
    ]


def subjects(system: Launched) -> list[str]:
    ids = {service: [each["id"] for each in system.processes(service)] for service in ("router", "scheduler", "worker")}
    request = RequestId("0123456789abcdef0123456789abcdef")
    found = [request_subject(MODEL, Lane.INTERACTIVE), cancel_subject(request), dead_subject(MODEL, request)]
    found += [telemetry_subject("worker", "worker-1"), hello_subject(MODEL, WorkerId("worker-1"))]
    for router in map(RouterId, ids["router"]):
        found += [
            tokens_subject(router, request),
            attached_subject(router),
            loads_subject(router),
            story_subject(router),
        ]
    for scheduler in map(SchedulerId, ids["scheduler"]):
        found += [progress_subject(scheduler), story_query_subject(scheduler), flight_subject(scheduler)]
    for worker in map(WorkerId, ids["worker"]):
        found += [grants_subject(worker), commands_subject(worker)]
    buckets = (KEYS, ACCOUNTS, CALLS, GROUPS, LEASES, LOSSES, MODELS)
    return found + [bucket_subject(bucket.name, key) for bucket in buckets for key in ("nobody.0", "nobody")]


def publisher_of(subject: str) -> Role | None:
    """Who may say something there."""
    allowed = [role for role in Role if any(matcher(each)(subject) for each in permissions_of(role).publish)]
    return allowed[0] if allowed else None


async def test_what_is_no_message_is_refused_everywhere(scripted: Launched, tmp_path: Path) -> None:
    pids, marker = lasting(scripted), tmp_path / "marker"
    buses = {role: await scripted.bus(role) for role in Role}
    try:
        publishers = {subject: publisher_of(subject) for subject in subjects(scripted)}
        assert set(publishers.values()) == {*Role, None}
        for subject, role in publishers.items():
            if role is not None:
                for payload in payloads(marker):
                    buses[role].publish(subject, payload)
        for bus in buses.values():
            await bus._core.flush()
        async with httpx.AsyncClient(base_url=scripted.url, timeout=60.0, trust_env=False) as client:
            for path, streamed in WAYS * 3:
                assert (await ask(client, path, {"text": "all well"}, streamed, max_tokens=30)).text == "all well"
                await asyncio.sleep(0.2)
        async with broker_view(scripted) as broker:
            for _ in range(600):
                if await broker.num_queued() == 0:
                    break
                await asyncio.sleep(0.1)
            assert await broker.num_queued() == 0, "what is no request is taken out of the queue"
        for bucket in (KEYS, ACCOUNTS, CALLS, GROUPS, LEASES, LOSSES, MODELS):
            for key in ("nobody.0", "nobody"):
                if (role := publisher_of(bucket_subject(bucket.name, key))) is not None:
                    buses[role].publish(bucket_subject(bucket.name, key), b"", {"KV-Operation": "PURGE"})
    finally:
        for bus in buses.values():
            await bus.close()
    assert not marker.exists()
    assert pids == lasting(scripted), "a process has died"
    log = "".join(path.read_text() for path in scripted.data_dir.rglob("*.log"))
    assert "undecodable" in log or "dropped" in log, "it was told"
    assert "Traceback" not in log and "handler failed" not in log
