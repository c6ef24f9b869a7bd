"""The Swarm driver, through the proxy, on a real engine; and the stack file as it is."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from headrace_autoscaler.docker_engine import DockerEngine
from headrace_autoscaler.driver import DriverError, Fenced, Instance, InstanceState
from headrace_autoscaler.swarm_driver import SwarmDriver
from headrace_cli.init_command import InitSettings, make_secrets
from headrace_shared.messages import WorkerId
from tests.docker.engine import ROOT, CommandError, Engine, run
from tests.docker.toy_project import MODEL, SCRIPT, running_proxy, toy_service

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

STACK = "headrace-swarm"
FILE_STACK = "headrace-swarm-file"
"""Another: networks of the first may still be on their way out."""
SERVICE = f"{STACK}_worker"


@pytest.fixture(scope="module")
def swarm(engine: Engine) -> Iterator[None]:
    """This machine as a Swarm of one node."""
    state = run(["docker", "info", "--format", "{{.Swarm.LocalNodeState}}"]).strip()
    if state != "inactive":
        pytest.skip("this engine is in a Swarm already, which is not ours")
    run(["docker", "swarm", "init", "--advertise-addr", "127.0.0.1"])
    try:
        yield
    finally:
        _wait_until_removed()
        run(["docker", "swarm", "leave", "--force"])
        _remove_bridge()


@pytest.fixture
def stack(swarm: None, tmp_path: Path) -> Iterator[None]:
    """One toy worker that is named as the stack file names it."""
    service = {
        "image": toy_service()["image"],
        "entrypoint": ["sh", "-c", SCRIPT],
        "environment": {"HEADRACE_MODEL": MODEL, "HEADRACE_SERVICE_ID": "worker-{{.Task.ID}}"},
        "deploy": {
            "replicas": 1,
            "labels": {"com.headrace.role": "worker"},
            "restart_policy": {"condition": "on-failure"},
        },
        "networks": ["backplane"],
    }
    file = tmp_path / "stack.yaml"
    networks = {"backplane": {"driver": "overlay", "internal": True}}
    file.write_text(yaml.safe_dump({"version": "3.9", "services": {"worker": service}, "networks": networks}))
    run(["docker", "stack", "deploy", "--resolve-image", "never", "--compose-file", file, STACK])
    try:
        yield
    finally:
        run(["docker", "stack", "rm", STACK])


@contextlib.asynccontextmanager
async def running_driver() -> AsyncIterator[SwarmDriver]:
    async with running_proxy(STACK, with_swarm=True) as url:
        driver = SwarmDriver(DockerEngine(url), STACK)
        try:
            yield driver
        finally:
            await driver.close()


def replicas() -> int:
    [service] = json.loads(run(["docker", "service", "inspect", SERVICE]))
    number: int = service["Spec"]["Mode"]["Replicated"]["Replicas"]
    return number


async def until_running(driver: SwarmDriver, count: int) -> Sequence[Instance]:
    async with asyncio.timeout(240):
        while True:
            found = await driver.instances()
            if [instance.state for instance in found] == [InstanceState.RUNNING] * count:
                return found
            await asyncio.sleep(0.2)


async def test_replicas_come_and_go_as_workers(stack: None) -> None:
    async with running_driver() as driver:
        [first] = await until_running(driver, 1)
        assert (first.model, first.worker, first.is_managed) == (MODEL, f"worker-{first.key}", True)
        assert f"started as {first.worker}" in run(["docker", "service", "logs", SERVICE])

        await driver.start(MODEL, WorkerId("worker-aa"), generation=2)
        await driver.start(MODEL, WorkerId("worker-aa"), generation=2)
        assert replicas() == 2, "a start that is repeated counts once"
        with pytest.raises(Fenced):
            await driver.start(MODEL, WorkerId("worker-bb"), generation=1)
        with pytest.raises(DriverError, match="serves another"):
            await driver.start("another", WorkerId("worker-bb"), generation=2)
        [left] = [instance for instance in await until_running(driver, 2) if instance.key != first.key]

        # One that has drained over the bus leaves by itself, and only then is its replica taken away.
        run(["docker", "kill", "--signal", "TERM", _container_of(left)])
        async with asyncio.timeout(240):
            while True:
                states = {found.key: found.state for found in await driver.instances()}
                if states.get(left.key) is InstanceState.EXITED:
                    break
                await asyncio.sleep(0.2)
        await driver.stop(left, 0)
        await driver.stop(left, 0)
        assert replicas() == 1, "a stop that is repeated counts once"
        assert [instance.key for instance in await until_running(driver, 1)] == [first.key], "the other one has stayed"

        await driver.stop(first, 0)
        assert replicas() == 0


def test_the_stack_file_deploys_as_it_is(swarm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its services exist as asked; whether they run is for the images, which need not be there."""
    make_secrets(tmp_path / "secrets", InitSettings())
    monkeypatch.setenv("HEADRACE_SECRETS", str(tmp_path / "secrets"))
    try:
        run(
            [
                "docker",
                "stack",
                "deploy",
                "--resolve-image",
                "never",
                "--compose-file",
                ROOT / "deploy/compose.swarm.yaml",
                FILE_STACK,
            ]
        )
        listed = run(["docker", "stack", "services", "--format", "{{.Name}} {{.Replicas}}", FILE_STACK]).splitlines()
        wanted = {line.split()[0].removeprefix(f"{FILE_STACK}_"): line.split()[1].partition("/")[2] for line in listed}
        assert wanted == {
            "nats": "1",
            "router": "2",
            "scheduler": "2",
            "worker": "1",
            "autoscaler": "1",
            "docker-proxy": "1",
        }
    finally:
        run(["docker", "stack", "rm", FILE_STACK])


def _wait_until_removed() -> None:
    """Swarm removes in its own time, and what it has not removed stays when its node leaves."""
    label = "label=com.docker.stack.namespace"
    deadline = time.monotonic() + 240
    while run(["docker", "ps", "--all", "--quiet", "--filter", label]) + run(
        ["docker", "network", "ls", "--quiet", "--filter", label]
    ):
        assert time.monotonic() < deadline, "the stacks are still there"
        time.sleep(0.2)


def _container_of(instance: Instance) -> str:
    found = run(["docker", "ps", "--quiet", "--filter", f"label=com.docker.swarm.task.id={instance.key}"]).split()
    if len(found) != 1:
        raise CommandError(f"no container of task {instance.key}")
    return found[0]


def _remove_bridge() -> None:
    """Containers of tasks that have just been removed may still be leaving it."""
    ends_at = time.monotonic() + 240
    while True:
        try:
            run(["docker", "network", "rm", "docker_gwbridge"])
            return
        except CommandError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.5)
