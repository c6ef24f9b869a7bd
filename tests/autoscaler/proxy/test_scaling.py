import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_autoscaler.proxy.routes import Refused
from headrace_autoscaler.proxy.scaling import checked_scaling
from headrace_autoscaler.swarm_spec import Scaling, scaled
from tests.autoscaler.proxy.scripted_engine import ScriptedEngine, running_proxy

SPEC: dict[str, Any] = {
    "Name": "headrace_worker",
    "Labels": {"com.docker.stack.namespace": "headrace", "com.headrace.role": "worker"},
    "TaskTemplate": {"ContainerSpec": {"Image": "headrace-worker@sha256:ab", "Env": ["HEADRACE_MODEL=smollm2-135m"]}},
    "Mode": {"Replicated": {"Replicas": 1}},
    "EndpointSpec": {"Mode": "vip"},
}
SERVICE = {"ID": "svc1", "Version": {"Index": 12}, "Spec": SPEC}


def asked(replicas: int, generation: int = 3) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(scaled(SPEC, Scaling(replicas, generation, "worker-0a"))))
    return body


def test_another_number_of_replicas_passes() -> None:
    assert checked_scaling("headrace", SPEC, 8, asked(3)) == asked(3)


def at(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        at("TaskTemplate", "ContainerSpec", "Image", value="alpine"),
        at("TaskTemplate", "ContainerSpec", "Mounts", value=[{"Type": "bind", "Source": "/", "Target": "/host"}]),
        at("TaskTemplate", "ContainerSpec", "CapabilityAdd", value=["CAP_SYS_ADMIN"]),
        at("TaskTemplate", "ContainerSpec", "Privileges", value={}),
        at("TaskTemplate", "Networks", value=[{"Target": "host"}]),
        at("TaskTemplate", "ForceUpdate", value=1),
        at("TaskTemplate", "Runtime", value="plugin"),
        at("EndpointSpec", value={"Ports": [{"PublishedPort": 22}]}),
        at("Name", value="other"),
        at("Labels", "x", value="y"),
        at("Mode", value={"Global": {}}),
        at("Mode", value={"Replicated": {"Replicas": 9}}),
        at("Mode", value={"Replicated": {"Replicas": -1}}),
        at("Mode", value={"Replicated": {"Replicas": True}}),
        at("Mode", value={"Replicated": {"Replicas": 2}, "Global": {}}),
        at("UpdateConfig", value={"Parallelism": 1}),
    ],
)
def test_any_other_change_of_the_service_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    given = asked(3)
    change(given)
    with pytest.raises(Refused):
        checked_scaling("headrace", SPEC, 8, given)


@pytest.mark.parametrize("labels", [{}, {"com.docker.stack.namespace": "shop", "com.headrace.role": "worker"}])
def test_services_of_others_are_not_scaled(labels: dict[str, str]) -> None:
    with pytest.raises(Refused, match="no worker service of this stack"):
        checked_scaling("headrace", {**SPEC, "Labels": labels}, 8, asked(3))


def test_a_deposed_autoscaler_scales_nothing() -> None:
    with pytest.raises(Refused, match="generation 3 is over"):
        checked_scaling("headrace", scaled(SPEC, Scaling(2, 4, "worker-0b")), 8, asked(3, generation=3))


async def test_a_service_is_updated_by_compare_and_set(tmp_path: Path) -> None:
    engine = ScriptedEngine(services=[copy.deepcopy(SERVICE)])
    async with running_proxy(engine, tmp_path, with_swarm=True) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1.41/services"
        assert (await client.post(f"{url}/svc1/update?version=12", json=asked(2))).status_code == 200
        assert (await client.post(f"{url}/svc1/update?version=-1", json=asked(2))).status_code == 400
        for listed in (url, url.replace("services", "tasks")):
            assert (await client.get(listed)).status_code == 200
    [change] = engine.changes
    assert (change.query, change.body) == ({"version": ["12"]}, asked(2))
    wanted = {"label": ["com.docker.stack.namespace=headrace", "com.headrace.role=worker"]}
    assert [json.loads(call.query["filters"][0]) for call in engine.received[-2:]] == [wanted, wanted]


@pytest.mark.parametrize("answer", [b"{", b"[]", b"null", {"ID": "svc1"}, {"ID": "svc1", "Spec": {"Labels": {}}}])
async def test_a_service_that_the_engine_describes_oddly_is_a_503(answer: Any, tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.answer = lambda call: (200, answer)
    async with running_proxy(engine, tmp_path, with_swarm=True) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1.41/services/svc1/update?version=12"
        assert (await client.post(url, json=asked(2))).status_code == 503
    assert engine.changes == []
