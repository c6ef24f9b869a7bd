"""Which processes make up an instance, with which settings. Pure."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace_cli.process import ProcessSpec
from headrace_cli.settings import UpSettings
from headrace_shared.broker_credentials import key_path
from headrace_shared.broker_permissions import Role
from headrace_shared.python_module import python_module
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

_OURS = frozenset(PREFIX + name for name in ("CONFIG", "NATS_USER", "NATS_PASSWORD", "NATS_PASSWORD_FILE", "BROKER_CA"))
"""Of the caller's environment: meant for another broker, or for this command alone."""
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


class Plan(NamedTuple):
    routers: list[ProcessSpec]
    schedulers: list[ProcessSpec]
    workers: list[ProcessSpec]
    """Those at the start."""
    autoscalers: list[ProcessSpec]
    places: tuple[Mapping[str, str], ...] = ()
    """With autoscale: the environment of each place in which a worker may run."""

    @property
    def services(self) -> list[ProcessSpec]:
        return [*self.routers, *self.schedulers, *self.workers, *self.autoscalers]

    @property
    def models(self) -> set[str]:
        return {spec.model for spec in self.workers}

    def worker(self, model: str, place: int, *, is_parked: bool) -> ProcessSpec:
        """The process of a worker of one of `models` in one of `places`, which count from 1."""
        spec = next(spec for spec in self.workers if spec.model == model)
        own = {**self.places[place - 1], **({PREFIX + "PARKED": "true"} if is_parked else {})}
        return spec._replace(name=f"worker-{place}", environ={**spec.environ, **own})


def computes_on_cores(settings: UpSettings, environ: Mapping[str, str], num_gpus: int) -> bool:
    """Whether engines share this machine's cores with the services. `num_gpus`: of the machine."""
    if settings.sim or environ.get(PREFIX + "ENGINE") == "timing":
        return False
    device = settings.device or environ.get(PREFIX + "DEVICE") or "auto"
    return device == "cpu" or (device == "auto" and not num_gpus)


def make_plan(
    settings: UpSettings,
    environ: Mapping[str, str],
    *,
    nats_url: str,
    credentials: Path,
    num_cores: int,
    num_gpus: int = 0,
    config: str = "",
) -> Plan:
    """`credentials` is the folder with the keys of all services (`broker_credentials.py`). `config` is the YAML file of
    `headrace up`, in which each service finds its section. `num_gpus`: of the machine; they are dealt out to
    workers that are started and stopped."""
    base = {key: value for key, value in environ.items() if key not in _OURS}
    base |= {
        PREFIX + "NATS_URL": nats_url,
        PREFIX + "HEALTH_PORT": "0",
        PREFIX + "DRAIN_TIMEOUT_S": str(settings.drain_timeout_s),
        "PYTHONUNBUFFERED": "1",
    }
    specs = partial(_specs, base, credentials, config)
    places = worker_places(settings, environ, num_gpus) if settings.autoscale else ()
    worker = _worker_settings(settings, num_cores // (len(places) or settings.num_workers))
    schedulers: list[ProcessSpec] = []
    workers: list[ProcessSpec] = []
    for source, model, num_workers in settings.models:
        own = worker | {"model": _absolute(source) if "/" in source else source, "served_name": model}
        first = len(schedulers) + 1
        schedulers += specs("scheduler", settings.schedulers, {"model": model}, model=model, first=first)
        workers += specs("worker", num_workers, own, model=model, first=len(workers) + 1)
    autoscaler: dict[str, object] = {}
    if settings.autoscale:
        autoscaler = {
            "driver": "process",
            "served_models": ",".join(model.name for model in settings.models),
            "min_workers": min(settings.min_workers, len(places)),
            "max_workers": len(places),
        }
    router: dict[str, object] = {"host": settings.host}
    if settings.require_keys:  # else the router's own section of the file may still say so
        router["require_keys"] = True
    return Plan(
        routers=specs("router", settings.routers, router, port=settings.port),
        schedulers=schedulers,
        workers=workers,
        autoscalers=specs("autoscaler", int(settings.autoscaler), autoscaler),
        places=places,
    )


def _specs(
    base: Mapping[str, str],
    credentials: Path,
    config: str,
    service: str,
    count: int,
    own: Mapping[str, object],
    *,
    port: int = 0,
    model: str = "",
    first: int = 1,
) -> list[ProcessSpec]:
    """`own`: settings of this service alone. `port`: of the first; `first`: its number."""
    made = []
    for index in range(count):
        variables = {PREFIX + name.upper(): str(value) for name, value in own.items()}
        variables[PREFIX + "BROKER_CREDENTIALS"] = str(key_path(credentials, Role(service)))
        if config:
            variables[PREFIX + "CONFIG"] = f"{config.partition('#')[0]}#{service}"
        if port:
            variables[PREFIX + "PORT"] = str(port + index)
        made.append(
            ProcessSpec(
                service=service,
                name=f"{service}-{first + index}",
                command=tuple(python_module(f"headrace_{service}")),
                environ={**base, **variables},
                port=port + index if port else 0,
                model=model,
            )
        )
    return made


def _worker_settings(settings: UpSettings, num_cores: int) -> dict[str, object]:
    """`num_cores`: for each worker."""
    worker: dict[str, object] = {name: value for name in FORWARDED if (value := getattr(settings, name))}
    worker |= {"kv_cache_bytes": settings.kv_cache_bytes, "num_threads": settings.num_threads or max(1, num_cores)}
    if settings.lora:
        worker["lora"] = ",".join(map(_absolute_adapter, settings.lora))
    if settings.lora_dir:
        worker["lora_dir"] = Path(settings.lora_dir).expanduser().absolute()
    if settings.sim:
        worker["engine"] = "timing"
    return worker


def worker_places(settings: UpSettings, environ: Mapping[str, str], num_gpus: int) -> tuple[Mapping[str, str], ...]:
    """At most `max_workers`; where there are GPUs, as many as those suffice for, each with its own."""
    visible = environ.get(CUDA_DEVICES)
    devices = [str(index) for index in range(num_gpus)] if visible is None else visible.split(",")
    devices = [device.strip() for device in devices[:num_gpus] if device.strip()]
    size = settings.num_ranks
    if settings.sim or settings.device not in ("", "auto", "cuda") or len(devices) < size:
        return ({},) * settings.max_workers
    groups = [",".join(devices[start : start + size]) for start in range(0, len(devices) - size + 1, size)]
    return tuple({CUDA_DEVICES: group} for group in groups[: settings.max_workers])


def _absolute_adapter(given: str) -> str:
    name, equals, folder = given.partition("=")
    return f"{name}{equals}{Path(folder).expanduser().absolute()}" if folder else given


def _absolute(model: str) -> str:
    return str(Path(model).expanduser()) if model.startswith("~") else model
