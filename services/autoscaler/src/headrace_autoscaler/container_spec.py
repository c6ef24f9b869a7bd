"""What a new worker container is made of: all as in its template but its name, number and GPUs. Pure.

The driver asks for this body, and the proxy in front of the engine computes it again and accepts no other: whoever
takes over the autoscaler can start one more worker, and nothing else.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_autoscaler.containers import (
    GENERATION,
    GPUS,
    MANAGED,
    MODEL,
    NUMBER,
    PARKED,
    REPLACES,
    WORKER,
    WorkerContainer,
)
from headrace_shared.messages import WorkerId

_CONFIG = (
    "User",
    "Cmd",
    "Entrypoint",
    "WorkingDir",
    "Healthcheck",
    "StopSignal",
    "StopTimeout",
)
_HOST_CONFIG = (
    "Binds",
    "Mounts",
    "LogConfig",
    "NetworkMode",
    "CapDrop",
    "SecurityOpt",
    "ReadonlyRootfs",
    "Tmpfs",
    "ShmSize",
    "Ulimits",
    "Init",
    "Runtime",
    "Memory",
    "MemorySwap",
    "MemoryReservation",
    "NanoCpus",
    "CpuShares",
    "CpuPeriod",
    "CpuQuota",
    "CpusetCpus",
    "CpusetMems",
    "PidsLimit",
    "OomScoreAdj",
    "Dns",
    "DnsOptions",
    "DnsSearch",
    "ExtraHosts",
    "GroupAdd",
)
_NOT_CLONED = (
    "Privileged",
    "CapAdd",
    "Devices",
    "DeviceCgroupRules",
    "VolumesFrom",
    "Links",
    "PidMode",
    "UTSMode",
    "UsernsMode",
    "CgroupParent",
    "PortBindings",
    "PublishAllPorts",
    "Sysctls",
    "StorageOpt",
)
"""What gives a container more of its host than a worker needs. A template that has any of it is not cloned."""
_OWN_ENV = ("HEADRACE_SERVICE_ID", "HEADRACE_PARKED")
_RUNTIMES = ("", "runc", "io.containerd.runc.v2", "nvidia")
_PRIVATE_IPC = ("", "private", "shareable", "none")
_OWN_FOLDERS = ("/etc", "/proc", "/sys", "/dev", "/run", "/var/run", "/boot", "/var/lib/docker", "/var/lib/containerd")
"""Of the host: nothing in them is a model."""
_ROOTS = ("/", "/bin", "/home", "/lib", "/opt", "/root", "/sbin", "/usr", "/var", "/var/lib")
"""Folders of the host that are not bound as a whole."""


class Clone(NamedTuple):
    """In what a clone differs from its template."""

    worker: WorkerId
    model: str
    generation: int
    number: int
    gpus: tuple[str, ...]
    parked: bool = False


class Unclonable(Exception):
    """Why no container like this one may be started. The message is one line for the operator."""


def clone_body(template: WorkerContainer, clone: Clone) -> dict[str, Any]:
    """The body of `POST /containers/create`. Raises Unclonable."""
    details = template.details
    config, host = details["Config"], details["HostConfig"]
    _check(template, host)
    labels = {key: value for key, value in template.labels.items() if key not in (REPLACES, GPUS, PARKED)}
    labels |= {MANAGED: "true", WORKER: clone.worker, MODEL: clone.model}
    labels |= {GENERATION: str(clone.generation), NUMBER: str(clone.number)}
    if clone.gpus:
        labels[GPUS] = ",".join(clone.gpus)
    own_env = [f"HEADRACE_SERVICE_ID={clone.worker}"]
    if clone.parked:
        labels[PARKED] = "true"
        own_env.append("HEADRACE_PARKED=true")
    env = [item for item in config.get("Env") or () if item.partition("=")[0] not in _OWN_ENV]
    return {
        **_present(config, _CONFIG),
        # The very image that the template runs, whatever its tag means by now.
        "Image": details["Image"],
        "Env": [*env, *own_env],
        "Labels": labels,
        "HostConfig": {
            **_present(host, _HOST_CONFIG),
            # Who starts again is somebody new on the bus, so this one must not: the autoscaler starts another.
            "RestartPolicy": {"Name": "no"},
            "DeviceRequests": _device_requests(template, clone.gpus),
        },
        "NetworkingConfig": {"EndpointsConfig": _endpoints(template)},
    }


def _check(template: WorkerContainer, host: Mapping[str, Any]) -> None:
    name = template.name
    for key in _NOT_CLONED:
        if host.get(key):
            raise Unclonable(f"{name} has {key} set; workers that an autoscaler starts may not")
    if (host.get("IpcMode") or "") not in _PRIVATE_IPC:
        raise Unclonable(f"{name} shares the host's memory segments (ipc: {host['IpcMode']}); set shm_size instead")
    if (host.get("Runtime") or "") not in _RUNTIMES:
        raise Unclonable(f"{name} has runtime {host['Runtime']}; known are runc and nvidia")
    for key in ("Memory", "PidsLimit"):
        if (host.get(key) or 0) <= 0:
            raise Unclonable(f"{name} has no limit: {key}; set mem_limit and pids_limit")
    options = host.get("SecurityOpt") or ()
    if not any(option.replace("=", ":") in ("no-new-privileges", "no-new-privileges:true") for option in options):
        raise Unclonable(f"{name} lacks the security option no-new-privileges")
    for option in options:
        if "unconfined" in option or "disable" in option:
            raise Unclonable(f"{name} has the security option {option}")
    networks = _networks(template)
    if not networks or host.get("NetworkMode") not in networks:
        raise Unclonable(f"{name} is on no network of its project (network mode {host.get('NetworkMode')})")
    for bind in host.get("Binds") or ():
        _check_source(name, bind.partition(":")[0])
    for mount in host.get("Mounts") or ():
        if mount.get("Type") not in ("bind", "volume", "tmpfs"):
            raise Unclonable(f"{name} has a mount of type {mount.get('Type')}")
        if (mount.get("VolumeOptions") or {}).get("DriverConfig"):
            raise Unclonable(f"{name} has a volume with a driver's options")
        if mount["Type"] == "bind":
            _check_source(name, mount.get("Source") or "")
    visible = template.env.get("NVIDIA_VISIBLE_DEVICES", "void")
    if visible not in ("", "void", "none") and not template.device_requests:
        raise Unclonable(
            f"{name} names its GPUs by NVIDIA_VISIBLE_DEVICES; reserve devices instead, as compose.gpu.yaml"
        )


def _networks(template: WorkerContainer) -> dict[str, Any]:
    networks: dict[str, Any] = template.details["NetworkSettings"].get("Networks") or {}
    return {name: found for name, found in networks.items() if name not in ("host", "none", "bridge")}


def _check_source(name: str, source: str) -> None:
    """Volumes have names; what begins with a slash is a folder of the host."""
    if not source.startswith("/"):
        return
    path = "/" + "/".join(part for part in source.split("/") if part not in ("", "."))
    is_within = any(path == folder or path.startswith(folder + "/") for folder in _OWN_FOLDERS)
    if ".." in path.split("/") or path in _ROOTS or is_within or path.endswith(".sock"):
        raise Unclonable(f"{name} has {source} of the host bound, which is more than a folder of models")


def _endpoints(template: WorkerContainer) -> dict[str, Any]:
    service = template.labels.get("com.docker.compose.service", "worker")
    return {name: {"Aliases": [service]} for name in sorted(_networks(template))}


def _device_requests(template: WorkerContainer, gpus: tuple[str, ...]) -> list[dict[str, Any]]:
    name, requests = template.name, template.device_requests
    if len(gpus) != template.num_gpus:
        raise Unclonable(f"{name} takes {template.num_gpus} GPUs, not {len(gpus)}")
    if not requests:
        return []
    if len(requests) > 1:
        raise Unclonable(f"{name} reserves devices more than once")
    [request] = requests
    capabilities = request.get("Capabilities") or []
    if (request.get("Driver") or "nvidia") != "nvidia" or not all("gpu" in group for group in capabilities):
        raise Unclonable(f"{name} reserves devices that are no NVIDIA GPUs")
    if request.get("Options"):
        raise Unclonable(f"{name} reserves GPUs with a driver's options")
    return [{"Driver": "nvidia", "DeviceIDs": list(gpus), "Capabilities": [["gpu"]]}]


def _present(source: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """What is set. Empty values are left to the engine, whose versions write them differently."""
    return {key: source[key] for key in keys if source.get(key) not in (None, "", [], {}, False, 0)}
