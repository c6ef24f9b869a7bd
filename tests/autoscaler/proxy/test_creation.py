import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace_autoscaler.container_spec import Clone, clone_body
from headrace_autoscaler.containers import WorkerContainer, read_container
from headrace_autoscaler.proxy.creation import checked_body, difference, read_clone
from headrace_autoscaler.proxy.routes import Refused
from tests.autoscaler.inspections import MODEL, clone, clone_details, gpu_worker, worker_container

TEMPLATE = worker_container()
Change = Callable[[dict[str, Any]], None]


def check(
    given: Any,
    containers: tuple[WorkerContainer, ...] = (TEMPLATE,),
    name: str = "headrace-worker-0a",
    max_managed: int = 8,
    asked: Clone | None = None,
) -> dict[str, Any]:
    return checked_body("headrace", containers, max_managed, name, asked or read_clone(given), given)


def on_wire(asked: Clone, template: WorkerContainer = TEMPLATE) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(clone_body(template, asked)))
    return body


def test_a_clone_of_the_projects_worker_passes_in_the_proxys_own_words() -> None:
    given = on_wire(clone())
    body = check(given)
    assert body == given
    assert body is not given


def put(*path: str, value: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        target = body
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


def in_host(key: str, value: Any) -> Change:
    return put("HostConfig", key, value=value)


SOCKET = "/var/run/docker.sock"
ESCAPES: dict[str, Change] = {
    "another image": put("Image", value="alpine"),
    "the image by its name, whatever that is by now": put("Image", value="headrace-worker"),
    "another command": put("Cmd", value=["sh"]),
    "another entrypoint": put("Entrypoint", value=["sh", "-c", "id"]),
    "root": put("User", value="0:0"),
    "another environment": lambda body: body["Env"].append("LD_PRELOAD=/models/x.so"),
    "another health check": put("Healthcheck", value={"Test": ["CMD-SHELL", "id"]}),
    "another working folder": put("WorkingDir", value="/"),
    "volumes of the image": put("Volumes", value={"/x": {}}),
    "a terminal": put("Tty", value=True),
    "on build": put("OnBuild", value=["RUN id"]),
    "a shell": put("Shell", value=["/bin/sh"]),
    "another host name": put("Hostname", value="nats"),
    "another MAC address": put("MacAddress", value="02:42:ac:11:00:02"),
    "another stop signal": put("StopSignal", value="SIGKILL"),
    "another project's label": put("Labels", "com.docker.compose.project", value="victim"),
    "another service's label": put("Labels", "com.docker.compose.service", value="router"),
    "a further label": put("Labels", "traefik.enable", value="true"),
    "not a worker": put("Labels", "com.headrace.role", value="proxy"),
    "not managed": put("Labels", "com.headrace.managed", value="false"),
    "privileged": in_host("Privileged", True),
    "privileged as a number": in_host("Privileged", 1),
    "host network": in_host("NetworkMode", "host"),
    "a container's network": in_host("NetworkMode", "container:headrace-docker-proxy-1"),
    "another network": in_host("NetworkMode", "headrace_engine"),
    "a further network": put("NetworkingConfig", "EndpointsConfig", "headrace_engine", value={}),
    "another alias": put("NetworkingConfig", "EndpointsConfig", "headrace_backplane", value={"Aliases": ["nats"]}),
    "host pid": in_host("PidMode", "host"),
    "a container's pid": in_host("PidMode", "container:headrace-docker-proxy-1"),
    "host ipc": in_host("IpcMode", "host"),
    "host uts": in_host("UTSMode", "host"),
    "host users": in_host("UsernsMode", "host"),
    "host cgroups": in_host("CgroupnsMode", "host"),
    "a cgroup parent": in_host("CgroupParent", "/"),
    "a bind of the root": in_host("Binds", ["headrace_models:/models:ro", "/:/host"]),
    "a bind of the socket": in_host("Binds", [f"{SOCKET}:{SOCKET}"]),
    "the volume to write": in_host("Binds", ["headrace_models:/models"]),
    "another volume": in_host("Binds", ["headrace_nats-data:/models:ro"]),
    "shared propagation": in_host("Binds", ["headrace_models:/models:ro,rshared"]),
    "a mount": in_host("Mounts", [{"Type": "bind", "Source": "/", "Target": "/host"}]),
    "a volume driver": in_host("VolumeDriver", "local"),
    "volumes from another": in_host("VolumesFrom", ["headrace-docker-proxy-1"]),
    "capabilities": in_host("CapAdd", ["SYS_ADMIN"]),
    "capabilities kept": lambda body: body["HostConfig"].pop("CapDrop"),
    "other capabilities dropped": in_host("CapDrop", ["NET_RAW"]),
    "a device": in_host("Devices", [{"PathOnHost": "/dev/kmsg", "PathInContainer": "/x", "CgroupPermissions": "rwm"}]),
    "device rules": in_host("DeviceCgroupRules", ["a *:* rwm"]),
    "all GPUs": in_host("DeviceRequests", [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}]),
    "another driver's device": in_host("DeviceRequests", [{"Driver": "cdi", "DeviceIDs": ["vendor.com/x=all"]}]),
    "no seccomp": in_host("SecurityOpt", ["no-new-privileges:true", "seccomp=unconfined"]),
    "no apparmor": in_host("SecurityOpt", ["no-new-privileges:true", "apparmor=unconfined"]),
    "new privileges": in_host("SecurityOpt", []),
    "unmasked paths": in_host("MaskedPaths", []),
    "writable paths": in_host("ReadonlyPaths", []),
    "a writable root": lambda body: body["HostConfig"].pop("ReadonlyRootfs"),
    "no memory limit": lambda body: body["HostConfig"].pop("Memory"),
    "another memory limit": in_host("Memory", 1 << 40),
    "no limit of processes": lambda body: body["HostConfig"].pop("PidsLimit"),
    "another runtime": in_host("Runtime", "sysbox-runc"),
    "sysctls": in_host("Sysctls", {"kernel.core_pattern": "|/x"}),
    "a published port": in_host("PortBindings", {"22/tcp": [{"HostPort": "22"}]}),
    "all ports published": in_host("PublishAllPorts", True),
    "restarts": in_host("RestartPolicy", {"Name": "always"}),
    "removed at its end": in_host("AutoRemove", True),
    "logs elsewhere": in_host("LogConfig", {"Type": "syslog", "Config": {"syslog-address": "tcp://1.2.3.4"}}),
    "another host's address": in_host("ExtraHosts", ["nats:1.2.3.4"]),
    "another resolver": in_host("Dns", ["1.2.3.4"]),
    "a group of the host": in_host("GroupAdd", ["docker"]),
    "a file of ids": in_host("ContainerIDFile", "/etc/cron.d/x"),
    "executable temporary files": in_host("Tmpfs", {"/tmp": "exec"}),
    "a further temporary file system": in_host("Tmpfs", {"/tmp": "size=256m,mode=1777", "/app": ""}),
    "never killed for memory": in_host("OomKillDisable", True),
    "another priority": in_host("OomScoreAdj", -1000),
    "a setting that this proxy does not know": in_host("Annotations", {"x": "y"}),
    "a key in other letters": put("hostconfig", value={"Privileged": True}),
    "no host settings at all": lambda body: body.pop("HostConfig"),
}


@pytest.mark.parametrize("change", ESCAPES.values(), ids=ESCAPES)
def test_whatever_differs_from_the_template_is_refused(change: Change) -> None:
    given = on_wire(clone())
    change(given)
    with pytest.raises(Refused) as refused:
        check(given, asked=clone())
    assert refused.value.status == 403
    assert "LD_PRELOAD" not in str(refused.value), "values may be secret"


@pytest.mark.parametrize("given", [None, [], "x", {}, {"Labels": None}, {"Labels": {"com.headrace.worker": 1}}])
def test_a_body_that_names_no_worker_is_refused(given: Any) -> None:
    with pytest.raises(Refused):
        read_clone(given)


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("worker", ""),
        ("worker", "../x"),
        ("worker", "a b"),
        ("worker", "-x"),
        ("worker", "x" * 49),
        ("model", ""),
        ("model", "x" * 257),
        ("generation", "-1"),
        ("generation", "1.0"),
        ("generation", "９"),
        ("generation", "9" * 19),
        ("gpus", ""),
        ("gpus", "0,0"),
        ("gpus", "all;x"),
        ("gpus", ",".join(map(str, range(65)))),
    ],
)
def test_what_may_differ_is_checked_for_its_form(label: str, value: str) -> None:
    given = on_wire(clone())
    given["Labels"][f"com.headrace.{label}"] = value
    with pytest.raises(Refused, match="malformed"):
        read_clone(given)


def test_the_name_is_that_of_the_worker() -> None:
    with pytest.raises(Refused, match="headrace-worker-0a is wanted"):
        check(on_wire(clone()), name="headrace-nats-1")


def test_a_model_that_no_worker_of_the_project_serves_cannot_be_started() -> None:
    given = on_wire(clone())
    given["Labels"]["com.headrace.model"] = "another"
    with pytest.raises(Refused, match="serves another"):
        check(given)


def test_the_number_of_containers_is_bounded() -> None:
    made = read_container(clone_details(TEMPLATE, clone("worker-0b")))
    assert check(on_wire(clone()), (TEMPLATE, made), max_managed=2)
    with pytest.raises(Refused, match="there are 1 managed containers; 1 are allowed"):
        check(on_wire(clone()), (TEMPLATE, made), max_managed=1)


def test_a_deposed_autoscaler_starts_nothing() -> None:
    made = read_container(clone_details(TEMPLATE, clone("worker-0b", generation=4)))
    with pytest.raises(Refused, match="generation 3 is over, 4 has begun") as refused:
        check(on_wire(clone(generation=3)), (TEMPLATE, made))
    assert refused.value.status == 412
    assert check(on_wire(clone(generation=4)), (TEMPLATE, made))


def test_no_gpu_is_given_out_twice() -> None:
    template = gpu_worker("0")
    made = read_container(clone_details(template, clone("worker-0b", gpus=("1",))))
    for taken in ("0", "1"):
        with pytest.raises(Refused, match="has one of these GPUs"):
            check(on_wire(clone(gpus=(taken,)), template), (template, made))
    assert check(on_wire(clone(gpus=("2",)), template), (template, made))
    ended = read_container(clone_details(template, clone("worker-0b", gpus=("1",)), status="exited"))
    assert check(on_wire(clone(gpus=("1",)), template), (template, ended))


def test_gpus_cannot_be_added_to_a_worker_that_has_none() -> None:
    given = on_wire(clone())
    given["Labels"]["com.headrace.gpus"] = "0"
    given["HostConfig"]["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": ["0"], "Capabilities": [["gpu"]]}]
    with pytest.raises(Refused, match="takes 0 GPUs, not 1"):
        check(given)


def test_a_template_that_is_no_safe_one_is_not_cloned() -> None:
    unsafe = worker_container({"HostConfig": {"Privileged": True}})
    with pytest.raises(Refused, match="Privileged"):
        check(on_wire(clone()), (unsafe,))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"a": {"b": [1, {"c": 2}]}}, None),
        ({"a": {"b": [1, {"c": 3}]}}, "a.b[1].c"),
        ({"a": {"b": [1]}}, "a.b"),
        ({"a": {"b": [1, {"c": 2, "d": 0}]}}, "a.b[1].d"),
        ({"a": {"b": [True, {"c": 2}]}}, "a.b[0]"),
        ({}, "a"),
        ([], ""),
    ],
)
def test_the_first_difference_is_named(given: Any, where: str | None) -> None:
    assert difference({"a": {"b": [1, {"c": 2}]}}, given) == where


def test_the_model_of_a_clone_is_its_templates() -> None:
    assert check(on_wire(clone()))["Labels"]["com.headrace.model"] == MODEL
    parked = copy.deepcopy(on_wire(clone(parked=True)))
    assert "HEADRACE_PARKED=true" in check(parked)["Env"]
