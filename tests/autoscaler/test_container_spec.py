from typing import Any

import pytest

from headrace_autoscaler.container_spec import Unclonable, clone_body
from headrace_autoscaler.containers import GPUS, MANAGED, free_number, read_container, taken_gpus, template_of
from headrace_autoscaler.gpu_inventory import Gpu
from tests.autoscaler.inspections import (
    IMAGE,
    MODEL,
    clone,
    clone_details,
    gpu_worker,
    with_env,
    worker_container,
)


def test_a_clone_is_its_template_but_for_name_number_and_restarts() -> None:
    template = worker_container()
    body = clone_body(template, clone())
    host = template.details["HostConfig"]
    for key in ("Binds", "LogConfig", "NetworkMode", "CapDrop", "ReadonlyRootfs", "SecurityOpt", "Tmpfs", "Memory"):
        assert body["HostConfig"][key] == host[key], key
    assert body["HostConfig"]["PidsLimit"] == 512
    assert (body["Image"], body["User"], body["StopTimeout"]) == (IMAGE, "10001:10001", 30)
    assert body["Env"] == [*template.details["Config"]["Env"], "HEADRACE_SERVICE_ID=worker-0a"]
    assert body["HostConfig"]["RestartPolicy"] == {"Name": "no"}, "who starts again is somebody new on the bus"
    assert body["NetworkingConfig"] == {"EndpointsConfig": {"headrace_backplane": {"Aliases": ["worker"]}}}
    changed = {key: value for key, value in body["Labels"].items() if template.labels.get(key) != value}
    assert changed == {
        "com.docker.compose.container-number": "2",
        "com.headrace.managed": "true",
        "com.headrace.worker": "worker-0a",
        "com.headrace.model": MODEL,
        "com.headrace.generation": "3",
    }


def test_a_clone_of_a_clone_is_the_same_but_for_its_name() -> None:
    first = clone_details(worker_container(), clone("worker-0a", parked=True))
    second = clone_body(read_container(first), clone("worker-0b"))
    assert second == clone_body(worker_container(), clone("worker-0b"))


def test_a_parked_clone_is_told_to_park() -> None:
    body = clone_body(worker_container(), clone(parked=True))
    assert "HEADRACE_PARKED=true" in body["Env"]
    assert body["Labels"]["com.headrace.parked"] == "true"


def test_a_clone_gets_its_own_gpus_and_no_others() -> None:
    body = clone_body(gpu_worker("0", tensor_parallel=2), clone(gpus=("GPU-01", "GPU-02")))
    assert body["HostConfig"]["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["GPU-01", "GPU-02"], "Capabilities": [["gpu"]]}
    ]
    assert body["Labels"][GPUS] == "GPU-01,GPU-02"


@pytest.mark.parametrize(("count", "gpus"), [(1, ()), (1, ("0", "1")), (2, ("0",))])
def test_a_worker_has_as_many_gpus_as_processes(count: int, gpus: tuple[str, ...]) -> None:
    with pytest.raises(Unclonable, match=f"takes {count} GPUs, not {len(gpus)}"):
        clone_body(gpu_worker("0", tensor_parallel=count), clone(gpus=gpus))


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ({"Privileged": True}, "Privileged"),
        ({"CapAdd": ["SYS_ADMIN"]}, "CapAdd"),
        ({"Devices": [{"PathOnHost": "/dev/sda"}]}, "Devices"),
        ({"DeviceCgroupRules": ["a *:* rwm"]}, "DeviceCgroupRules"),
        ({"VolumesFrom": ["other"]}, "VolumesFrom"),
        ({"PidMode": "host"}, "PidMode"),
        ({"UTSMode": "host"}, "UTSMode"),
        ({"UsernsMode": "host"}, "UsernsMode"),
        ({"CgroupParent": "/"}, "CgroupParent"),
        ({"PortBindings": {"22/tcp": [{}]}}, "PortBindings"),
        ({"Sysctls": {"kernel.shm_rmid_forced": "1"}}, "Sysctls"),
        ({"IpcMode": "host"}, "ipc: host"),
        ({"IpcMode": "container:abc"}, "ipc: container"),
        ({"NetworkMode": "host"}, "network mode host"),
        ({"NetworkMode": "container:abc"}, "network mode container"),
        ({"Runtime": "sysbox"}, "runtime sysbox"),
        ({"Memory": 0}, "no limit: Memory"),
        ({"PidsLimit": None}, "no limit: PidsLimit"),
        ({"PidsLimit": -1}, "no limit: PidsLimit"),
        ({"SecurityOpt": None}, "no-new-privileges"),
        ({"SecurityOpt": ["no-new-privileges:true", "seccomp=unconfined"]}, "seccomp=unconfined"),
        ({"SecurityOpt": ["no-new-privileges:true", "label=disable"]}, "label=disable"),
        ({"Binds": ["/var/run/docker.sock:/var/run/docker.sock"]}, "docker.sock"),
        ({"Binds": ["/:/models:ro"]}, "has / of the host"),
        ({"Binds": ["/srv/../etc:/models:ro"]}, r"/srv/\.\./etc"),
        ({"Binds": ["//etc//ssh:/models:ro"]}, "//etc//ssh"),
        ({"Binds": ["/home/me/engine.sock:/x"]}, "engine.sock"),
        ({"Mounts": [{"Type": "bind", "Source": "/proc", "Target": "/x"}]}, "has /proc of the host"),
        ({"Mounts": [{"Type": "npipe", "Source": "x", "Target": "/x"}]}, "npipe"),
        (
            {"Mounts": [{"Type": "volume", "VolumeOptions": {"DriverConfig": {"Options": {"device": "/"}}}}]},
            "driver's options",
        ),
    ],
)
def test_a_template_with_more_of_its_host_than_a_worker_needs_is_not_cloned(host: dict[str, Any], named: str) -> None:
    with pytest.raises(Unclonable, match=named):
        clone_body(worker_container({"HostConfig": host}), clone())


def test_gpus_named_by_the_environment_would_be_shared_so_they_are_refused() -> None:
    with pytest.raises(Unclonable, match="NVIDIA_VISIBLE_DEVICES"):
        clone_body(worker_container(with_env("NVIDIA_VISIBLE_DEVICES=all")), clone())


def test_folders_of_models_may_be_bound() -> None:
    body = clone_body(worker_container({"HostConfig": {"Binds": ["/srv/models:/models:ro"]}}), clone())
    assert body["HostConfig"]["Binds"] == ["/srv/models:/models:ro"]


def test_the_template_is_the_newest_that_compose_made_even_if_it_has_stopped() -> None:
    old = worker_container()
    new = worker_container({"Id": "2" * 64, "Created": "2026-11-29T12:00:00Z", "State": {"Status": "exited"}})
    made = read_container(clone_details(old, clone()))
    assert template_of([old, made, new], MODEL) is new
    assert template_of([made], MODEL) is made, "when compose's own are gone, a clone will do"
    assert template_of([old, made, new], "another") is None


def test_each_model_has_a_template_of_its_own() -> None:
    small = worker_container(with_env("HEADRACE_MODEL=/models/qwen3-0.6b.gguf"))
    large = worker_container(with_env("HEADRACE_SERVED_NAME=large"))
    assert template_of([small, large], "qwen3-0.6b") is small
    assert template_of([small, large], "large") is large


def test_numbers_fill_gaps() -> None:
    template = worker_container()
    third = read_container(clone_details(template, clone(number=3)))
    assert free_number([template, third]) == 2
    assert free_number([]) == 1


@pytest.mark.parametrize(
    ("status", "holds"),
    [("created", True), ("running", True), ("paused", True), ("restarting", True), ("exited", False), ("dead", False)],
)
def test_gpus_are_free_again_once_their_container_has_ended(status: str, holds: bool) -> None:
    inventory = (Gpu("GPU-a", 0), Gpu("GPU-b", 1))
    made = read_container(clone_details(gpu_worker("0"), clone(gpus=("GPU-b",)), status=status))
    assert taken_gpus([made], inventory) == ({"GPU-b"} if holds else set())


def test_what_the_engine_says_is_read() -> None:
    killed = worker_container({"State": {"Status": "exited", "ExitCode": 137}})
    assert (killed.exit_code, killed.started_at, killed.is_managed) == (137, 1795946401.5, False)
    never = worker_container({"State": {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z"}})
    assert (never.exit_code, never.started_at) == (None, 0.0)
    made = read_container(clone_details(worker_container(), clone()))
    assert (made.worker, made.model, made.generation, made.labels[MANAGED]) == ("worker-0a", MODEL, 3, "true")
