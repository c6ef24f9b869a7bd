"""What the autoscaler asks of whatever runs workers: local processes, a Docker Engine, a Swarm."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from headrace_shared.messages import WorkerId


class InstanceState(Enum):
    CREATED = "created"
    """Exists and does not run: its start was cut off."""
    RUNNING = "running"
    """Its process runs, whether or not the worker has said hello yet."""
    STOPPING = "stopping"
    EXITED = "exited"
    """Ended by itself or killed; what it leaves behind is still there."""


class Instance(NamedTuple):
    """A worker's container or process, as its engine sees it."""

    key: str
    """The driver's own name for it: container id, process name."""
    worker: WorkerId
    """What the worker calls itself on the bus."""
    model: str
    state: InstanceState
    started_at: float
    """Unix seconds; 0: never started."""
    exit_code: int | None
    is_managed: bool
    """Started by an autoscaler, which may stop and remove it. The others belong to the operator."""


class DriverError(Exception):
    """The engine refused, failed or did not answer in time. The message says which, in one line."""


class NoCapacity(DriverError):
    """There is no room for another worker now, such as a free GPU."""


class Fenced(DriverError):
    """The engine has seen a higher generation: another autoscaler leads."""


class Driver(Protocol):
    """Every call ends within a bounded time, and may be repeated: none does twice what was asked once."""

    async def instances(self) -> Sequence[Instance]:
        """All workers of this deployment, whoever started them and in whatever state. Raises DriverError."""

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        """Starts a worker of `model` that calls itself `worker`, and that parks once it has loaded if `parked`. One
        that is there already is returned (and started if it was only created). `generation` fences: an engine that can
        compare it refuses a lower one than it has seen. Raises DriverError, after which the instance may exist all the
        same."""

    async def stop(self, instance: Instance, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`; then removes what is left of it. Nothing to stop is no error. Raises
        DriverError."""

    async def close(self) -> None: ...
