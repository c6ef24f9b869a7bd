"""A deployment's worker containers, as the engine describes them. Pure.

Compose's labels tell what belongs to a project, which is how `docker compose ps`, `logs` and `down` find it; our own
tell what is a worker, and what an autoscaler has made. They are all that survives a crash of the autoscaler.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headrace_autoscaler.gpu_inventory import Gpu, named_gpus
from headrace_shared.messages import WorkerId
from headrace_shared.model_cards import served_name

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
REPLACES = "com.docker.compose.replace"
"""On a container that compose made in the place of another."""
ROLE = "com.headrace.role"
WORKER_ROLE = "worker"
MANAGED = "com.headrace.managed"
WORKER = "com.headrace.worker"
MODEL = "com.headrace.model"
GENERATION = "com.headrace.generation"
GPUS = "com.headrace.gpus"
PARKED = "com.headrace.parked"

WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
"""What a managed worker may be called: it becomes a part of its container's name."""

HOLDING = frozenset({"created", "running", "paused", "restarting", "removing"})
"""States in which a container has its GPUs, or gets them back by itself."""


class WorkerContainer(NamedTuple):
    id: str
    name: str
    status: str
    """Docker's word: created, running, paused, restarting, removing, exited, dead."""
    created: str
    """ISO 8601; in one engine's words, so that they can be compared as text."""
    started_at: float
    """Unix seconds; 0: never started."""
    exit_code: int | None
    labels: Mapping[str, str]
    env: Mapping[str, str]
    details: Mapping[str, Any]
    """All that the engine said."""

    @property
    def is_managed(self) -> bool:
        return self.labels.get(MANAGED) == "true"

    @property
    def worker(self) -> WorkerId:
        """What the worker calls itself; empty for one that chose its name at random."""
        return WorkerId(self.env.get("HEADRACE_SERVICE_ID", ""))

    @property
    def model(self) -> str:
        return self.env.get("HEADRACE_SERVED_NAME") or served_name(self.env.get("HEADRACE_MODEL", ""))

    @property
    def generation(self) -> int:
        text = self.labels.get(GENERATION, "")
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def number(self) -> int:
        text = self.labels.get(NUMBER, "")
        return int(text) if text.isascii() and text.isdigit() else 0

    @property
    def device_requests(self) -> Sequence[Mapping[str, Any]]:
        return self.details["HostConfig"].get("DeviceRequests") or ()

    @property
    def num_gpus(self) -> int:
        """GPUs that a clone of it takes: one for each process of its tensor- and pipeline-parallel engine."""
        if not self.device_requests:
            return 0
        return self._size("HEADRACE_TENSOR_PARALLEL") * self._size("HEADRACE_PIPELINE_PARALLEL")

    def gpus_of(self, inventory: Sequence[Gpu]) -> frozenset[str]:
        """Ids, as the inventory has them, of the GPUs that it holds now."""
        if self.status not in HOLDING:
            return frozenset()
        held: set[str] = set()
        for request in self.device_requests:
            held |= named_gpus(inventory, request.get("DeviceIDs") or (), request.get("Count") or 0)
        return frozenset(held)

    def _size(self, variable: str) -> int:
        text = self.env.get(variable, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 1


def read_container(details: Mapping[str, Any]) -> WorkerContainer:
    """From what `GET /containers/<id>/json` answers. Raises KeyError or TypeError if that is something else."""
    state = details["State"]
    started_at = unix_seconds(state.get("StartedAt", ""))
    has_ended = state["Status"] in ("exited", "dead")
    return WorkerContainer(
        id=details["Id"],
        name=details["Name"].removeprefix("/"),
        status=state["Status"],
        created=details["Created"],
        started_at=started_at,
        exit_code=int(state.get("ExitCode", 0)) if has_ended else None,
        labels=details["Config"].get("Labels") or {},
        env=dict(item.partition("=")[::2] for item in details["Config"].get("Env") or ()),
        details=details,
    )


def is_worker_of(labels: Mapping[str, str], project: str) -> bool:
    return labels.get(PROJECT) == project and labels.get(ROLE) == WORKER_ROLE


def template_of(containers: Iterable[WorkerContainer], model: str) -> WorkerContainer | None:
    """The container that new workers of `model` are clones of: the newest that compose made, in whatever state; else
    the newest clone, of which compose's own may have been removed."""
    fitting = [container for container in containers if container.model == model]
    return max(fitting, key=lambda container: (not container.is_managed, container.created, container.id), default=None)


def free_number(containers: Iterable[WorkerContainer]) -> int:
    """The lowest number that no container has; compose removes the highest first when it scales down."""
    taken = {container.number for container in containers}
    return next(number for number in range(1, len(taken) + 2) if number not in taken)


def taken_gpus(containers: Iterable[WorkerContainer], inventory: Sequence[Gpu]) -> frozenset[str]:
    return frozenset().union(*(container.gpus_of(inventory) for container in containers))


def container_name(project: str, worker: str) -> str:
    """One worker has one name, and the engine lets no two containers have the same."""
    return f"{project}-{worker}"


def unix_seconds(text: str) -> float:
    """Of the engine's timestamps; those of year 1 mean never."""
    if not text or text.startswith("0001-"):
        return 0.0
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
