"""What an engine answers about containers, as compose makes them from docker-compose.yml."""

import copy
from collections.abc import Mapping
from typing import Any

from headrace_autoscaler.container_spec import Clone, clone_body
from headrace_autoscaler.containers import PROJECT, ROLE, WorkerContainer, container_name, read_container
from headrace_shared.messages import WorkerId

IMAGE = "sha256:" + "ab" * 32
MODEL = "smollm2-135m"

_WORKER: dict[str, Any] = {
    "Id": "1" * 64,
    "Name": "/headrace-worker-1",
    "Created": "2026-11-29T10:00:00.123456789Z",
    "Image": IMAGE,
    "State": {
        "Status": "running",
        "ExitCode": 0,
        "StartedAt": "2026-11-29T10:00:01.5Z",
        "FinishedAt": "0001-01-01T00:00:00Z",
    },
    "Config": {
        "Hostname": "111111111111",
        "User": "10001:10001",
        "Env": [
            "HEADRACE_MODEL=smollm2-135m",
            "HEADRACE_SERVED_NAME=",
            "HEADRACE_NATS_URL=nats://nats:4222",
            "PATH=/bin",
        ],
        "Cmd": None,
        "Entrypoint": ["python", "-m", "headrace_worker"],
        "Image": "headrace-worker",
        "WorkingDir": "/tmp",
        "Healthcheck": {"Test": ["CMD", "true"], "Interval": 5_000_000_000},
        "StopTimeout": 30,
        "Labels": {
            PROJECT: "headrace",
            ROLE: "worker",
            "com.docker.compose.service": "worker",
            "com.docker.compose.container-number": "1",
            "com.docker.compose.oneoff": "False",
            "com.docker.compose.config-hash": "cd" * 32,
            "com.docker.compose.image": IMAGE,
        },
    },
    "HostConfig": {
        "Binds": ["headrace_models:/models:ro"],
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}},
        "NetworkMode": "headrace_backplane",
        "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
        "CapAdd": None,
        "CapDrop": ["ALL"],
        "CgroupnsMode": "host",
        "IpcMode": "private",
        "PidMode": "",
        "Privileged": False,
        "ReadonlyRootfs": True,
        "SecurityOpt": ["no-new-privileges:true"],
        "Tmpfs": {"/tmp": "size=256m,mode=1777"},
        "ShmSize": 67108864,
        "Runtime": "runc",
        "Memory": 4294967296,
        "MemorySwap": 8589934592,
        "NanoCpus": 0,
        "PidsLimit": 512,
        "Devices": [],
        "DeviceRequests": None,
        "Mounts": None,
        "PortBindings": {},
    },
    "NetworkSettings": {
        "Networks": {"headrace_backplane": {"Aliases": ["headrace-worker-1", "worker", "111111111111"]}}
    },
}


def worker_details(changes: Mapping[str, Any] | None = None, **labels: str) -> dict[str, Any]:
    """Of a worker that compose made. `changes` are deep: {"HostConfig": {"Privileged": True}}."""
    details = copy.deepcopy(_WORKER)
    _change(details, changes or {})
    details["Config"]["Labels"].update(labels)
    return details


def worker_container(changes: Mapping[str, Any] | None = None, **labels: str) -> WorkerContainer:
    return read_container(worker_details(changes, **labels))


def with_env(*items: str) -> dict[str, Any]:
    return {"Config": {"Env": [*_WORKER["Config"]["Env"], *items]}}


def gpu_worker(*device_ids: str, tensor_parallel: int = 1, **changes: Any) -> WorkerContainer:
    request = {"Driver": "nvidia", "Count": 0, "DeviceIDs": list(device_ids), "Capabilities": [["gpu"]], "Options": {}}
    env = with_env(f"HEADRACE_TENSOR_PARALLEL={tensor_parallel}")
    return worker_container({**env, "HostConfig": {"DeviceRequests": [request]}, **changes})


def clone(worker: str = "worker-0a", **changes: Any) -> Clone:
    made = Clone(WorkerId(worker), MODEL, generation=3, number=2, gpus=())
    return made._replace(**changes)


def clone_details(template: WorkerContainer, made: Clone, status: str = "running", **state: Any) -> dict[str, Any]:
    """What the engine says of a container that was made from `clone_body`."""
    body = clone_body(template, made)
    host, networking = body.pop("HostConfig"), body.pop("NetworkingConfig")
    identity = f"{abs(hash(made.worker)):x}".rjust(64, "0")[:64]
    return {
        "Id": identity,
        "Name": "/" + container_name("headrace", made.worker),
        "Created": "2026-11-29T11:00:00.5Z",
        "Image": body["Image"],
        "State": {"Status": status, "ExitCode": 0, "StartedAt": "2026-11-29T11:00:01Z", **state},
        "Config": body,
        "HostConfig": host,
        "NetworkSettings": {"Networks": networking["EndpointsConfig"]},
    }


def _change(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _change(target[key], value)
        else:
            target[key] = value
