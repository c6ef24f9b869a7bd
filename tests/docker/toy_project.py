"""A compose project whose worker is a shell script: what matters here is containers, not what runs in them."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import yaml

from headrace_autoscaler.docker_driver import DockerDriver
from headrace_autoscaler.docker_engine import DockerEngine
from headrace_autoscaler.proxy.engine_socket import EngineSocket
from headrace_autoscaler.proxy.gatekeeper import Gatekeeper
from headrace_autoscaler.proxy.http_server import HttpServer
from tests.docker.base_images import base_images
from tests.docker.engine import CommandError, compose_command, run

PROJECT = "headrace-toy"
MODEL = "toy"
SOCKET = "/var/run/docker.sock"
SCRIPT = "echo started as $$HEADRACE_SERVICE_ID; trap 'exit 0' TERM; while :; do sleep 0.1; done"


def toy_service(**changes: Any) -> dict[str, Any]:
    [image] = [name for name in base_images() if name.startswith("nats:")]
    return {
        "image": image,
        "pull_policy": "never",
        "entrypoint": ["sh", "-c", SCRIPT],
        "user": "10001:10001",
        "restart": "unless-stopped",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "networks": ["backplane"],
        "tmpfs": ["/tmp:size=1m,mode=1777"],
        "volumes": ["models:/models:ro"],
        "mem_limit": "64m",
        "pids_limit": 32,
        "stop_grace_period": "5s",
        "logging": {"driver": "json-file", "options": {"max-size": "1m"}},
        "environment": {"HEADRACE_MODEL": MODEL},
        "labels": {"com.headrace.role": "worker"},
        **changes,
    }


class ToyProject:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "compose.yaml"
        services = {"worker": toy_service(), "bystander": toy_service(labels={})}
        networks = {"backplane": {"internal": True}}
        self._file.write_text(yaml.safe_dump({"services": services, "networks": networks, "volumes": {"models": {}}}))

    def compose(self, *arguments: str) -> str:
        return run([*compose_command(), "--project-name", PROJECT, "--file", str(self._file), *arguments])

    def workers(self) -> dict[str, str]:
        """Name -> state of the worker service's containers, as compose sees them."""
        lines = self.compose("ps", "--all", "--format", "json", "worker").splitlines()
        return {found["Name"]: found["State"] for found in map(json.loads, lines)}


@contextlib.contextmanager
def running_project(folder: Path) -> Iterator[ToyProject]:
    project = ToyProject(folder)
    project.compose("down", "--volumes", "--timeout", "1")
    try:
        project.compose("up", "--detach")
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "1")


@contextlib.asynccontextmanager
async def running_proxy(project: str = PROJECT, with_swarm: bool = False) -> AsyncIterator[str]:
    """The proxy in this process, before the real engine; its URL."""
    server = HttpServer(Gatekeeper(EngineSocket(SOCKET), project, 8, with_swarm).handle)
    try:
        yield f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def running_driver(url: str) -> AsyncIterator[DockerDriver]:
    driver = DockerDriver(DockerEngine(url), PROJECT, lambda: ())
    try:
        yield driver
    finally:
        await driver.close()


def inspect(name: str) -> dict[str, Any] | None:
    try:
        [found] = json.loads(run(["docker", "inspect", "--type", "container", name]))
    except CommandError:
        return None
    details: dict[str, Any] = found
    return details
