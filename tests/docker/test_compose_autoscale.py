"""`docker compose --profile autoscale up`: workers are containers that come and go with the load."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docker.engine import CommandError, build_environment, compose_command, run
from tests.docker.load import Load, running_load
from tests.docker.stack import PROJECT, Stack

# The first test may have to wait for the images.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

MODEL = "smollm2-135m"
OVERLAY = Path(__file__).parent / "autoscale.yaml"
PERIOD_S = 2.0
"""Of the overlay."""
MAX_MANAGED = 3
"""Beside the one that compose starts."""
NUM_CLIENTS = 14
"""Nearly twice as many as all workers run at a time, so that all are needed."""


class Managed(NamedTuple):
    name: str
    worker: str
    state: str
    created_at: float


def managed() -> list[Managed]:
    """Containers that the autoscaler has started."""
    while True:
        ids = run(["docker", "ps", "--all", "--quiet", "--filter", "label=com.headrace.managed=true"]).split()
        try:
            return [_managed(found) for found in json.loads(run(["docker", "inspect", *ids]))] if ids else []
        except CommandError:
            continue  # one has been removed meanwhile


def _managed(found: dict[str, Any]) -> Managed:
    created = datetime.fromisoformat(found["Created"]).timestamp()
    return Managed(found["Name"], found["Config"]["Labels"]["com.headrace.worker"], found["State"]["Status"], created)


async def until(
    what: Callable[[list[Managed]], bool], load: Load | None = None, timeout_s: float = 400
) -> list[Managed]:
    """Looks until the managed containers are as wanted. Fails at once if a request has failed."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = await asyncio.to_thread(managed)
        if await asyncio.to_thread(what, found):
            return found
        assert load is None or not load.failures, load.failures
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


async def answers_per_second(load: Load, count: int) -> float:
    started = time.monotonic()
    await load.wait_for_answers(count)
    return count / (time.monotonic() - started)


@pytest.fixture(scope="module")
def autoscaled(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The images of `stack`, composed as a user does who wants the autoscaler to act. After a failure its log is
    shown."""
    num_failed = request.session.testsfailed
    autoscaled = Stack(compose_command(), build_environment(), files=[OVERLAY], profiles=["autoscale"])
    try:
        autoscaled.up()
        yield autoscaled
        if request.session.testsfailed > num_failed:
            sys.stdout.write(autoscaled.compose("logs", "--tail", "200", "autoscaler", "docker-proxy"))
    finally:
        autoscaled.down()


def adopted(stack: Stack) -> int:
    return stack.compose("logs", "scheduler").count('"worker adopted"')


@pytest.mark.parametrize("service", ["router", "scheduler", "worker"])
def test_nobody_but_the_autoscaler_reaches_the_proxy(autoscaled: Stack, service: str) -> None:
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 2375), 2)\n"
        "except OSError as error: print('unreachable')"
    )
    [proxy] = autoscaled.containers("docker-proxy")
    networks = json.loads(run(["docker", "inspect", proxy.name]))[0]["NetworkSettings"]["Networks"]
    assert set(networks) == {f"{PROJECT}_engine"}
    # By its address: that its name is not known to them would not keep anybody out.
    address = networks[f"{PROJECT}_engine"]["IPAddress"]
    assert autoscaled.execute(service, "python", "-c", code, address).strip() == "unreachable"
    assert autoscaled.execute("autoscaler", "python", "-c", code, address).strip() == ""


async def test_a_flood_brings_workers_and_calm_takes_them_away(autoscaled: Stack) -> None:
    async with running_load(autoscaled.url(), MODEL, num_clients=1) as calm:
        await calm.wait_for_answers(2)
        started_at = time.time()
        async with running_load(autoscaled.url(), MODEL, num_clients=NUM_CLIENTS) as flood:
            await flood.wait_for_answers(2)
            alone = await answers_per_second(flood, 6)
            first = min(each.created_at for each in await until(lambda found: len(found) > 0, flood))
            assert first - started_at < 2 * PERIOD_S + 3, "two evaluations, and what a busy machine adds"
            await until(lambda found: len(found) == MAX_MANAGED, flood)
            await until(lambda _: adopted(autoscaled) > MAX_MANAGED, flood)
            await flood.wait_for_answers(NUM_CLIENTS)
            together = await answers_per_second(flood, 2 * NUM_CLIENTS)
            assert together > 1.5 * alone, (alone, together)
        await until(lambda found: len(found) < MAX_MANAGED, calm)
        await calm.wait_for_answers(3)
    assert (flood.failures, calm.failures) == ([], [])


async def test_an_autoscaler_that_is_killed_leaves_no_orphan_and_starts_none_twice(autoscaled: Stack) -> None:
    def is_complete(found: list[Managed]) -> bool:
        assert len(found) <= MAX_MANAGED
        assert len({each.worker for each in found}) == len(found)
        return [each.state for each in found] == ["running"] * MAX_MANAGED

    [container] = autoscaled.containers("autoscaler")
    before = len(managed())
    async with running_load(autoscaled.url(), MODEL, num_clients=NUM_CLIENTS) as flood:
        await until(lambda found: len(found) > before, flood)
        # Not `docker kill`, after which the engine would not start it again.
        pid = json.loads(run(["docker", "inspect", container.name]))[0]["State"]["Pid"]
        os.kill(pid, signal.SIGKILL)
        await until(is_complete, flood)
    assert flood.failures == []
    await until(lambda found: found == [])  # its successor knows what was started, and takes all of it away


async def test_down_leaves_nothing_of_what_was_started(autoscaled: Stack) -> None:
    async with running_load(autoscaled.url(), MODEL, num_clients=NUM_CLIENTS) as flood:
        await until(lambda found: len(found) > 0, flood)
    await asyncio.to_thread(autoscaled.down)
    assert managed() == []
    assert autoscaled.leftovers() == [], PROJECT
