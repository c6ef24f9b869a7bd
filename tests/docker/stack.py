"""A compose project made from docker-compose.yml as it is, with ports and a name of its own."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.docker.engine import ROOT, CommandError, run

PROJECT = "headrace-test"
SERVICES = ("nats", "router", "scheduler", "worker", "autoscaler")
BUILD_TIMEOUT_S = 1200.0
UP_TIMEOUT_S = 300.0
DOWN_TIMEOUT_S = 120.0


class Container(NamedTuple):
    name: str
    service: str
    health: str
    ports: tuple[int, ...]
    """Published ports of the host."""


class Stack:
    """The project's containers. Nothing runs before `up`."""

    def __init__(
        self, compose: Sequence[str], environ: dict[str, str], files: Sequence[Path] = (), profiles: Sequence[str] = ()
    ) -> None:
        self._compose = [*compose, "--project-name", PROJECT]
        for file in (ROOT / "docker-compose.yml", *files):
            self._compose += ["--file", str(file)]
        # The index of CPU builds need not be reachable where pip finds one in a folder. Workers that together have more
        # threads than there are cores slow each other down manyfold.
        self._environ = {"TORCH_INDEX": "https://pypi.org/simple", "HEADRACE_NUM_THREADS": "1", **environ}
        # As a line in .env does: every command then means these profiles too, `down` among them.
        self._environ["COMPOSE_PROFILES"] = ",".join(profiles)
        self.port = free_ports(1)

    def compose(self, *arguments: str, timeout_s: float = 300.0, ports: str = "") -> str:
        """Runs `docker compose` on the project. Raises CommandError."""
        environ = {**self._environ, "HEADRACE_PORT": ports or str(self.port)}
        return run([*self._compose, *arguments], timeout_s, environ)

    def build(self) -> None:
        """Images of profiles that are off, too."""
        self.compose("--profile", "autoscale", "build", timeout_s=BUILD_TIMEOUT_S)

    def up(self, *arguments: str, ports: str = "") -> None:
        """Returns when every container is healthy. Raises CommandError with the services' last log lines."""
        wait = ("--detach", "--wait", "--wait-timeout", str(int(UP_TIMEOUT_S)))
        try:
            self.compose("up", *wait, *arguments, timeout_s=UP_TIMEOUT_S + 60, ports=ports)
        except CommandError as error:
            error.add_note(self.compose("logs", "--tail", "30"))
            raise

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", timeout_s=DOWN_TIMEOUT_S)

    def clear(self) -> None:
        """Whatever a run before this one may have left, profiles that are off included."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", timeout_s=DOWN_TIMEOUT_S)

    def containers(self, service: str = "") -> list[Container]:
        """Without `init`, which has ended."""
        lines = self.compose("ps", "--all", "--format", "json", *filter(None, [service])).splitlines()
        found = [_container(json.loads(line)) for line in lines]
        return [container for container in found if container.service != "init"]

    def execute(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks that carry the project's label."""
        label = f"label=com.docker.compose.project={PROJECT}"
        found = run(["docker", "ps", "--all", "--quiet", "--filter", label])
        for kind in ("volume", "network"):
            found += run(["docker", kind, "ls", "--quiet", "--filter", label])
        return found.split()

    def url(self, port: int = 0) -> str:
        return f"http://127.0.0.1:{port or self.port}"


def _container(found: dict[str, Any]) -> Container:
    published = {publisher["PublishedPort"] for publisher in found["Publishers"] or []} - {0}
    return Container(found["Name"], found["Service"], found["Health"], tuple(sorted(published)))


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        if first + count <= 65536 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
