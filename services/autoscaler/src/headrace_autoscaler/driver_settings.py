"""Settings of what runs the workers, and the driver that they name."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from headrace_autoscaler.driver import Driver
from headrace_autoscaler.gpu_inventory import Gpu, listed_gpus
from headrace_autoscaler.process_driver import ProcessDriver
from headrace_shared.common_settings import CommonSettings
from headrace_shared.errors import ConfigError


class DriverSettings(CommonSettings, frozen=True, kw_only=True):
    driver: Literal["none", "docker", "swarm", "process"] = "none"
    """What runs workers: containers of a compose project (docker), replicas of a stack's service (swarm), or processes
    of this machine (process: set by `headrace up --autoscale`); none: the autoscaler only says how many there should
    be."""
    fleet_fd: int = -1
    """Descriptor of the socket to `headrace up`, which sets it."""
    docker_url: str = "http://127.0.0.1:2375"
    """Where the proxy in front of the Docker engine listens."""
    project: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]{0,62}$")] = "headrace"
    """Compose project, or Swarm stack, whose workers are managed."""
    gpus: tuple[str, ...] = ("auto",)
    """GPUs that workers may get, by index or UUID, separated by commas; auto: all that NVIDIA's driver lists. Of no
    concern for workers on CPUs."""

    def inventory(self) -> Callable[[], Sequence[Gpu]]:
        """Lists the GPUs that there are. Raises ConfigError."""
        if self.gpus == ("auto",):
            from headrace_autoscaler.nvml import local_gpus

            return local_gpus
        try:
            listed = listed_gpus(self.gpus)
        except ValueError as error:
            raise ConfigError("gpus", str(error)) from error
        return lambda: listed


def make_driver(settings: DriverSettings) -> Driver | None:
    """None if nothing is to be run. Raises ConfigError. Whether an engine can be reached shows at the first call."""
    if settings.driver == "none":
        return None
    if settings.driver == "process":
        return ProcessDriver(settings.fleet_fd)
    # Not needed, and not installed, where workers are processes.
    from headrace_autoscaler.docker_driver import DockerDriver
    from headrace_autoscaler.docker_engine import DockerEngine
    from headrace_autoscaler.swarm_driver import SwarmDriver

    engine = DockerEngine(settings.docker_url)
    if settings.driver == "swarm":
        return SwarmDriver(engine, settings.project)
    return DockerDriver(engine, settings.project, settings.inventory())
