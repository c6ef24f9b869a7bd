"""The driver, through the proxy, on a real engine."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_autoscaler.container_spec import clone_body
from headrace_autoscaler.containers import read_container
from headrace_autoscaler.docker_driver import DockerDriver
from headrace_autoscaler.docker_engine import DockerEngine
from headrace_autoscaler.driver import DriverError, Fenced, InstanceState
from headrace_shared.messages import WorkerId
from tests.autoscaler.inspections import clone
from tests.docker.engine import Engine, run
from tests.docker.toy_project import (
    MODEL,
    PROJECT,
    SOCKET,
    ToyProject,
    inspect,
    running_driver,
    running_project,
    running_proxy,
)

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

A, B = WorkerId("worker-aa"), WorkerId("worker-bb")


@pytest.fixture(scope="module")
def project(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyProject]:
    with running_project(tmp_path_factory.mktemp("toy")) as project:
        yield project


@pytest.fixture
async def url(project: ToyProject) -> AsyncIterator[str]:
    async with running_proxy() as url:
        yield url


@pytest.fixture
async def driver(url: str) -> AsyncIterator[DockerDriver]:
    async with running_driver(url) as driver:
        yield driver
        for instance in await driver.instances():
            if instance.is_managed:
                await driver.stop(instance, 0)


async def test_a_started_worker_is_one_of_composes_own(project: ToyProject, driver: DockerDriver) -> None:
    instance = await driver.start(MODEL, A, generation=1)
    assert (instance.worker, instance.model, instance.state) == (A, MODEL, InstanceState.RUNNING)
    assert instance.is_managed and instance.started_at > 0
    assert project.workers() == {f"{PROJECT}-worker-1": "running", f"{PROJECT}-{A}": "running"}
    assert f"started as {A}" in project.compose("logs", "worker")
    made, template = inspect(f"{PROJECT}-{A}"), inspect(f"{PROJECT}-worker-1")
    assert made is not None and template is not None
    same = ("Binds", "LogConfig", "NetworkMode", "CapDrop", "CapAdd", "SecurityOpt", "ReadonlyRootfs", "Tmpfs")
    for key in (*same, "Memory", "PidsLimit", "Privileged", "IpcMode", "PidMode", "UTSMode", "Devices", "CgroupnsMode"):
        assert made["HostConfig"][key] == template["HostConfig"][key], key
    assert made["Image"] == template["Image"]
    assert set(made["NetworkSettings"]["Networks"]) == set(template["NetworkSettings"]["Networks"])
    started = {found.worker: found.is_managed for found in await driver.instances()}
    assert started == {WorkerId(""): False, A: True}, "the bystander is no worker"


async def test_a_start_that_is_repeated_or_raced_makes_one(url: str, driver: DockerDriver, project: ToyProject) -> None:
    """Two autoscalers, each of which believes that it leads."""
    async with running_driver(url) as other:
        starts = [each.start(MODEL, A, generation=2) for each in (driver, other, driver, other)]
        made = await asyncio.gather(*starts)
    assert len({instance.key for instance in made}) == 1
    assert len(project.workers()) == 2
    assert {(await driver.start(MODEL, A, generation=2)).key} == {made[0].key}


async def test_who_no_longer_leads_starts_nothing(driver: DockerDriver, project: ToyProject) -> None:
    await driver.start(MODEL, A, generation=5)
    with pytest.raises(Fenced):
        await driver.start(MODEL, B, generation=4)
    assert len(project.workers()) == 2


async def test_a_start_that_was_cut_off_goes_on(url: str, driver: DockerDriver) -> None:
    """As if the autoscaler had died between creating and starting."""
    template = inspect(f"{PROJECT}-worker-1")
    assert template is not None
    engine = DockerEngine(url)
    body = clone_body(read_container(template), clone(A, model=MODEL, generation=5))
    await engine.create(f"{PROJECT}-{A}", body)
    await engine.close()
    [found] = [instance for instance in await driver.instances() if instance.is_managed]
    assert (found.worker, found.state, found.started_at) == (A, InstanceState.CREATED, 0.0)
    assert (await driver.start(MODEL, A, generation=6)).state is InstanceState.RUNNING
    [found] = [instance for instance in await driver.instances() if instance.is_managed]
    await driver.stop(found, 0)


async def test_a_killed_worker_stays_to_be_seen_until_it_is_removed(driver: DockerDriver, project: ToyProject) -> None:
    await driver.start(MODEL, A, generation=7)
    details = inspect(f"{PROJECT}-{A}")
    assert details is not None
    os.kill(details["State"]["Pid"], signal.SIGKILL)
    ended = await _until_managed(driver, InstanceState.EXITED)
    assert ended.exit_code == 137
    with pytest.raises(DriverError, match="has ended already, with exit code 137"):
        await driver.start(MODEL, A, generation=7)
    await driver.stop(ended, 5)
    assert list(project.workers()) == [f"{PROJECT}-worker-1"]
    await driver.stop(ended, 5)  # what is gone is no error


async def test_a_stop_lets_the_worker_finish_within_its_grace(driver: DockerDriver, project: ToyProject) -> None:
    instance = await driver.start(MODEL, A, generation=8)
    stopping = asyncio.create_task(driver.stop(instance, 100))
    started = time.monotonic()
    await stopping
    assert time.monotonic() - started < 90, "it ended by itself at SIGTERM"
    assert list(project.workers()) == [f"{PROJECT}-worker-1"]


async def test_the_operators_workers_are_left_alone(driver: DockerDriver) -> None:
    [own] = await driver.instances()
    with pytest.raises(DriverError, match="belongs to the operator"):
        await driver.stop(own, 0)
    assert [found.state for found in await driver.instances()] == [InstanceState.RUNNING]


async def test_a_stopped_worker_is_still_the_pattern_for_new_ones(driver: DockerDriver, project: ToyProject) -> None:
    project.compose("stop", "--timeout", "1", "worker")
    assert (await driver.start(MODEL, A, generation=9)).state is InstanceState.RUNNING
    project.compose("start", "worker")
    with pytest.raises(DriverError, match="serves another"):
        await driver.start("another", B, generation=9)


ESCAPES: list[tuple[str, str, Any]] = [
    ("POST", "/containers/{id}/exec", {"Cmd": ["id"], "AttachStdout": True}),
    ("POST", "/containers/{id}/attach?stream=1&stdout=1", None),
    ("GET", "/containers/{id}/attach/ws?stream=1", None),
    ("GET", "/containers/{id}/archive?path=/etc", None),
    ("PUT", "/containers/{id}/archive?path=/tmp", None),
    ("GET", "/containers/{id}/export", None),
    ("GET", "/containers/{id}/logs?stdout=1", None),
    ("POST", "/containers/{id}/update", {"Memory": 0}),
    ("POST", "/containers/{id}/rename?name=x", None),
    ("POST", "/containers/{id}/kill?signal=KILL", None),
    ("POST", "/commit?container={id}&repo=x", {}),
    ("POST", "/build?remote=https://example.com/x.git", None),
    ("POST", "/images/create?fromImage=alpine", None),
    ("POST", "/images/load", None),
    ("GET", "/events", None),
    ("GET", "/info", None),
    ("GET", "/images/json", None),
    ("POST", "/volumes/create", {"Driver": "local", "DriverOpts": {"type": "none", "o": "bind", "device": "/"}}),
    ("POST", "/networks/headrace-toy_backplane/connect", {"Container": "{id}"}),
    ("POST", "/plugins/pull?remote=x", []),
    ("POST", "/swarm/init", {"ListenAddr": "127.0.0.1"}),
    ("POST", "/auth", {}),
    ("POST", "/session", None),
]


@pytest.mark.parametrize(("method", "target", "body"), ESCAPES, ids=[f"{m} {t}" for m, t, _ in ESCAPES])
async def test_every_way_out_is_closed(url: str, project: ToyProject, method: str, target: str, body: Any) -> None:
    path = target.replace("{id}", f"{PROJECT}-worker-1")
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.request(method, url + path, json=body)).status_code == 403


CREATIONS: dict[str, dict[str, Any]] = {
    "privileged": {"Privileged": True},
    "host network": {"NetworkMode": "host"},
    "host pid": {"PidMode": "host"},
    "host ipc": {"IpcMode": "host"},
    "host users": {"UsernsMode": "host"},
    "root of the host": {"Binds": ["/:/host"]},
    "the engine's socket": {"Binds": [f"{SOCKET}:{SOCKET}"]},
    "a mount of the host": {"Mounts": [{"Type": "bind", "Source": "/", "Target": "/host"}]},
    "capabilities": {"CapAdd": ["SYS_ADMIN"]},
    "a device": {"Devices": [{"PathOnHost": "/dev/null", "PathInContainer": "/x", "CgroupPermissions": "rwm"}]},
    "no seccomp": {"SecurityOpt": ["seccomp=unconfined"]},
    "no limits": {"Memory": 0, "MemorySwap": 0, "PidsLimit": 0},
}


async def test_no_creation_gets_more_of_the_host_than_its_template(url: str, project: ToyProject) -> None:
    template = inspect(f"{PROJECT}-worker-1")
    assert template is not None
    name = f"{PROJECT}-{A}"
    engine = httpx.AsyncHTTPTransport(uds=SOCKET)
    async with httpx.AsyncClient(timeout=30) as client, httpx.AsyncClient(transport=engine) as direct:
        for what, changes in CREATIONS.items():
            body = clone_body(read_container(template), clone(A, model=MODEL, generation=10))
            body["HostConfig"] |= changes
            refused = await client.post(f"{url}/containers/create?name={name}", json=body)
            assert refused.status_code == 403, what
            assert inspect(name) is None, what
            # The engine itself would have done it.
            assert (await direct.post(f"http://docker/containers/create?name={name}", json=body)).status_code == 201, (
                what
            )
            await direct.delete(f"http://docker/containers/{name}?force=1")


async def test_an_engine_that_restarts_is_waited_for(
    engine: Engine, project: ToyProject, driver: DockerDriver, tmp_path: Path
) -> None:
    if not engine.is_ours:
        pytest.skip("the engine of this machine is not ours to restart")
    await driver.start(MODEL, A, generation=11)
    await asyncio.to_thread(engine.stop)
    with pytest.raises(DriverError, match="no Docker engine at"):
        await driver.instances()
    with pytest.raises(DriverError, match="tried again in"):
        await driver.instances()
    await asyncio.to_thread(engine.start)
    ended = await _until_managed(driver, InstanceState.EXITED)
    assert project.workers()[f"{PROJECT}-worker-1"] == "running", "compose's own come back by themselves"
    await driver.stop(ended, 0)
    assert (await driver.start(MODEL, B, generation=11)).state is InstanceState.RUNNING


def test_down_removes_what_an_autoscaler_has_started(project: ToyProject, engine: Engine) -> None:
    async def start() -> None:
        async with running_proxy() as url, running_driver(url) as driver:
            await driver.start(MODEL, A, generation=12)

    asyncio.run(start())
    assert len(project.workers()) == 2
    project.compose("down", "--volumes", "--timeout", "1")
    label = f"label=com.docker.compose.project={PROJECT}"
    assert run(["docker", "ps", "--all", "--quiet", "--filter", label]) == ""
    assert run(["docker", "network", "ls", "--quiet", "--filter", label]) == ""


async def _until_managed(driver: DockerDriver, state: InstanceState) -> Any:
    """The only managed instance, once it is in that state. An engine that is away is asked again."""
    async with asyncio.timeout(120):
        while True:
            try:
                managed = [instance for instance in await driver.instances() if instance.is_managed]
            except DriverError:
                managed = []
            if [instance.state for instance in managed] == [state]:
                return managed[0]
            await asyncio.sleep(0.1)
