"""Which processes make up an instance, with which settings. Pure."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace_cli.process import ProcessSpec
from headrace_cli.settings import UpSettings
from headrace_shared.settings import PREFIX

FORWARDED = (
    "device",
    "dtype",
    "context",
    "num_blocks",
    "max_sequences",
    "tensor_parallel",
    "pipeline_parallel",
    "gpu",
    "gpu_model",
)
"""Settings that the workers know under the same names, each with an empty or zero value for the worker's default."""


class Plan(NamedTuple):
    routers: list[ProcessSpec]
    schedulers: list[ProcessSpec]
    workers: list[ProcessSpec]
    autoscalers: list[ProcessSpec]

    @property
    def services(self) -> list[ProcessSpec]:
        return [*self.routers, *self.schedulers, *self.workers, *self.autoscalers]


def make_plan(
    settings: UpSettings, environ: Mapping[str, str], *, nats_url: str, num_cores: int, config: str = ""
) -> Plan:
    """`config` is the YAML file of `headrace up`, in which each service finds its section."""
    base = {key: value for key, value in environ.items() if key != PREFIX + "CONFIG"}
    base |= {
        PREFIX + "NATS_URL": nats_url,
        PREFIX + "HEALTH_PORT": "0",
        PREFIX + "DRAIN_TIMEOUT_S": str(settings.drain_timeout_s),
        "PYTHONUNBUFFERED": "1",
    }

    def specs(
        service: str, count: int, own: Mapping[str, object], *, port: int = 0, model: str = "", first: int = 1
    ) -> list[ProcessSpec]:
        made = []
        for index in range(count):
            variables = {PREFIX + name.upper(): str(value) for name, value in own.items()}
            if config:
                variables[PREFIX + "CONFIG"] = f"{config.partition('#')[0]}#{service}"
            if port:
                variables[PREFIX + "PORT"] = str(port + index)
            made.append(
                ProcessSpec(
                    service=service,
                    name=f"{service}-{first + index}",
                    command=(sys.executable, "-m", f"headrace_{service}"),
                    environ=base | variables,
                    port=port + index if port else 0,
                    model=model,
                )
            )
        return made

    worker: dict[str, object] = {name: value for name in FORWARDED if (value := getattr(settings, name))}
    worker |= {
        "kv_cache_bytes": settings.kv_cache_bytes,
        "num_threads": settings.num_threads or max(1, num_cores // settings.num_workers),
    }
    if settings.sim:
        worker["engine"] = "timing"
    schedulers: list[ProcessSpec] = []
    workers: list[ProcessSpec] = []
    for source, model, num_workers in settings.models:
        own = worker | {"model": _absolute(source) if "/" in source else source, "served_name": model}
        first = len(schedulers) + 1
        schedulers += specs("scheduler", settings.schedulers, {"model": model}, model=model, first=first)
        workers += specs("worker", num_workers, own, model=model, first=len(workers) + 1)
    return Plan(
        routers=specs("router", settings.routers, {"host": settings.host}, port=settings.port),
        schedulers=schedulers,
        workers=workers,
        autoscalers=specs("autoscaler", int(settings.autoscaler), {}),
    )


def _absolute(model: str) -> str:
    return str(Path(model).expanduser()) if model.startswith("~") else model
