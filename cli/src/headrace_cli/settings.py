"""Settings of the commands."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from headrace_shared.errors import ConfigError
from headrace_shared.model_cards import served_name
from headrace_shared.settings import Secret

Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_WORKERS = 64
Count = Annotated[int, Meta(ge=1, le=64)]


class UpModel(NamedTuple):
    """One of the models to start."""

    source: str
    name: str
    """In the API."""
    num_workers: int


class UpSettings(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """Address of the HTTP interface."""
    port: Port = 8000
    """Port of the first router; further routers take the ports that follow."""
    require_keys: bool = False
    """Answer only callers with an API key (`headrace keys create`)."""
    open_to_all: bool = False
    """Listen at an address that other machines reach, and answer whoever asks there."""
    routers: Count = 1
    """Number of router processes."""
    schedulers: Count = 1
    """Number of scheduler processes."""
    workers: Count = 1
    """Number of worker processes of each model; with autoscale: at the start."""
    autoscaler: bool = True
    """Start the autoscaler as well."""
    autoscale: bool = False
    """Let the autoscaler start and stop workers as the load asks for; else it only says how many there should be."""
    min_workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 1
    """Fewest workers of each model with autoscale; 0: the last one goes when nobody has asked for long, and the next
    request waits until a new one is ready."""
    max_workers: Count = 4
    """Most workers with autoscale, of all models and parked ones among them."""
    model: tuple[str, ...] = ("smollm2-135m",)
    """Built-in name, checkpoint folder, GGUF file, or hub id; MODEL=N starts N workers of it. Repeat it for several
    models."""
    served_name: str = ""
    """Name of the model in the API; empty: derived from the model. Not for several models."""
    device: str = ""
    """Where the workers compute: auto, cpu, cuda or cuda:N; empty: the worker's default."""
    dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """Number format of weights and cache; empty: the worker's default."""
    context: Annotated[int, Meta(ge=0)] = 0
    """Most tokens (prompt and answer) of a sequence; 0: the model's own."""
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] = 640 << 20
    """Size of each worker's KV cache on a CPU."""
    num_blocks: Annotated[int, Meta(ge=0)] = 0
    """Blocks of each worker's KV cache; 0: from kv-cache-bytes or free memory."""
    max_sequences: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Most sequences in one iteration; 0: the worker's default."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of each worker; 0: the cores shared evenly among the workers (with autoscale: among max-workers)."""
    tensor_parallel: Annotated[int, Meta(ge=0, le=64)] = 0
    """Processes of each worker that share the work of every layer; 0: the worker's default."""
    pipeline_parallel: Annotated[int, Meta(ge=0, le=64)] = 0
    """Stages that each worker's layers are dealt out to; 0: the worker's default."""
    lora: tuple[str, ...] = ()
    """LoRA adapters to load at the start, as NAME=FOLDER; requests name them as their model. Not for several models."""
    lora_dir: str = ""
    """Folder below which adapters may be loaded while it runs; empty: none."""
    sim: bool = False
    """Workers that take a GPU's time and compute nothing: the answers mean nothing."""
    gpu: str = ""
    """With sim: the GPU whose time is taken, such as l4, a100, h100 or h200; empty: the worker's default."""
    gpu_model: str = ""
    """With sim: the model whose time is taken on that GPU; empty: the worker's default."""
    data_dir: str = ""
    """Where queue, logs and state are kept; empty: headrace/PORT below $XDG_DATA_HOME or ~/.local/share."""
    sync_interval: Annotated[str, Meta(pattern="^(always|[1-9][0-9]{0,4}(ms|s))$")] = "always"
    """When the broker's writes are on disk: always, before a request is accepted, which costs the time of a disk's
    write each; or after a time such as 100ms, the most that a power failure can lose."""
    start_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Longest time without any progress before the start is given up."""
    drain_timeout_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Longest time each service gets to finish what is running when it is stopped."""

    def check(self) -> None:
        """Raises ConfigError if settings contradict each other."""
        if not (self.require_keys or self.open_to_all or is_loopback(self.host)):
            wanted = "--require-keys, or --open-to-all if anybody may use it"
            raise ConfigError("--host", f"other machines can reach {self.host or 'all addresses'}: add {wanted}")
        if not self.autoscale:
            return
        if not self.autoscaler:
            raise ConfigError("autoscale", "needs the autoscaler")
        for key, number in (("min_workers", self.min_workers * len(self.models)), ("workers", self.num_workers)):
            if number > self.max_workers:
                raise ConfigError(key, f"{number} in all exceeds max_workers, which is {self.max_workers}")

    @property
    def num_ranks(self) -> int:
        """Engine processes of each worker."""
        return max(1, self.tensor_parallel) * max(1, self.pipeline_parallel)

    @property
    def models(self) -> tuple[UpModel, ...]:
        """Raises ConfigError."""
        if not self.model:
            raise ConfigError("model", "must not be empty")
        if self.served_name and len(self.model) > 1:
            raise ConfigError("served_name", "is for one model only")
        if self.lora and len(self.model) > 1:
            raise ConfigError("lora", "is for one model only")
        models = tuple(_parse_model(given, self.workers, self.served_name) for given in self.model)
        for model in models:
            try:
                model.name.encode()
            except UnicodeEncodeError as error:
                raise ConfigError("model", "its name is no UTF-8: call it something else with --served-name") from error
        if len({model.name for model in models}) < len(models):
            raise ConfigError("model", "two of them have the same name")
        return models

    @property
    def num_workers(self) -> int:
        return sum(model.num_workers for model in self.models)


def _parse_model(given: str, num_workers: int, name: str) -> UpModel:
    source, equals, number = given.rpartition("=")
    if not equals or not number.isdecimal():
        return UpModel(given, name or served_name(given), num_workers)
    if not source or not 1 <= int(number) <= MAX_WORKERS:
        raise ConfigError("model", f"{given!r}: MODEL=N needs a model and 1 to {MAX_WORKERS} workers")
    return UpModel(source, name or served_name(source), int(number))


class PsSettings(Struct, frozen=True, kw_only=True):
    json: bool = False
    """Print JSON."""
    data_dir: str = ""
    """Of one instance; empty: all instances in the default place."""


class ChatSettings(Struct, frozen=True, kw_only=True):
    url: str = "http://127.0.0.1:8000"
    """Address of a router."""
    model: str = ""
    """Model to talk to; empty: the first that the server lists."""
    api_key: Secret = ""
    """Key to send, if the server wants one."""
    quick: str = ""
    """One message; print the answer and end."""
    system: str = ""
    """System message."""
    max_tokens: Annotated[int, Meta(ge=1)] = 512
    """Longest answer in tokens."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Randomness, 0 for none; the model's default if not set."""
    timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest silence of the server."""


class TopSettings(Struct, frozen=True, kw_only=True):
    url: str = "http://127.0.0.1:8000"
    """Address of a router."""
    api_key: Secret = ""
    """Key to send, if the server wants one."""
    once: bool = False
    """Print the fleet as it is now, and end."""
    json: bool = False
    """Print it as JSON, and end."""


class DoctorSettings(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    """Address that `headrace up` would listen at."""
    port: Port = 8000
    """Port that `headrace up` would listen at."""
    data_dir: str = ""
    """As for `headrace up`."""


def base_data_dir(environ: Mapping[str, str]) -> Path:
    """Holds the data folders of all instances that were given none. Raises ConfigError."""
    try:
        return Path(environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "headrace"
    except RuntimeError as error:  # a user without an entry, as in many containers
        raise ConfigError("data_dir", "must be given: this user has no home folder, and HOME is not set") from error


def data_dir_of(data_dir: str, port: int, environ: Mapping[str, str]) -> Path:
    return Path(data_dir).expanduser().absolute() if data_dir else base_data_dir(environ) / str(port)


def server_url(given: str) -> str:
    """The address of a server from what people call it: `localhost:8000`, or the base URL of OpenAI's clients."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Only this machine gets there. A name is taken for what it usually means, without asking anybody."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
