"""docker-compose.yml on a real engine, exactly as users run it."""

import asyncio
import json
import time

import httpx
import pytest
from openai import OpenAI

from tests.docker.engine import run
from tests.docker.load import running_load
from tests.docker.stack import PROJECT, SERVICES, Stack, free_ports

# The first test waits for the images: the limit is that of building all of them from nothing.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

MODEL = "smollm2-135m"
PYTHON_SERVICES = ("router", "scheduler", "worker", "autoscaler")
REPORT_PROCESS = """
import errno, json
status = dict(line.split(':', 1) for line in open('/proc/1/status'))
try:
    open('/written', 'w')
    root = 'writable'
except OSError as error:
    root = errno.errorcode[error.errno]
print(json.dumps({'uids': status['Uid'].split(), 'capabilities': int(status['CapBnd'], 16),
    'no_new_privileges': status['NoNewPrivs'].strip(), 'root': root}))
"""


def test_every_service_is_healthy(stack: Stack) -> None:
    assert sorted((c.service, c.health) for c in stack.containers()) == [(name, "healthy") for name in sorted(SERVICES)]
    assert httpx.get(stack.url() + "/health").status_code == 200


def test_without_the_profile_the_autoscaler_only_says_what_it_would_do(stack: Stack) -> None:
    deadline = time.monotonic() + 240.0
    while "workers cannot be started or stopped" not in stack.compose("logs", "autoscaler"):
        assert time.monotonic() < deadline, stack.compose("logs", "autoscaler")
        time.sleep(1.0)
    assert not stack.containers("docker-proxy")


def test_a_real_answer_streams_through_the_published_port(stack: Stack) -> None:
    with OpenAI(base_url=stack.url() + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        stream = client.chat.completions.create(
            model=MODEL,
            # Not of France: that answer is ahead by less than bfloat16's error without the compiled kernels.
            messages=[{"role": "user", "content": "What is the capital of Germany?"}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        chunks = [chunk for chunk in stream if chunk.choices]
    assert "Berlin" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_only_the_router_publishes_a_port_and_only_on_loopback(stack: Stack) -> None:
    published = {container.service: container.ports for container in stack.containers()}
    assert published == {name: (stack.port,) if name == "router" else () for name in SERVICES}
    [router] = stack.containers("router")
    [details] = json.loads(run(["docker", "inspect", router.name]))
    assert {binding["HostIp"] for binding in details["NetworkSettings"]["Ports"]["8000/tcp"]} == {"127.0.0.1"}


@pytest.mark.parametrize("service", PYTHON_SERVICES)
def test_services_run_without_privileges_on_a_read_only_root(stack: Stack, service: str) -> None:
    report = json.loads(stack.execute(service, "python", "-c", REPORT_PROCESS))
    assert report == {"uids": ["10001"] * 4, "capabilities": 0, "no_new_privileges": "1", "root": "EROFS"}


def test_the_broker_runs_without_privileges_on_a_read_only_root(stack: Stack) -> None:
    status = stack.execute("nats", "cat", "/proc/1/status")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    assert (lines["Uid"].split(), int(lines["CapBnd"], 16), lines["NoNewPrivs"].strip()) == (["10001"] * 4, 0, "1")
    assert "Read-only" in stack.execute("nats", "sh", "-c", "touch /written 2>&1 || true")


def test_memory_and_processes_are_limited(stack: Stack) -> None:
    for container in stack.containers():
        [details] = json.loads(run(["docker", "inspect", container.name]))
        assert details["HostConfig"]["Memory"] > 0, container.name
        assert details["HostConfig"]["PidsLimit"] > 0, container.name
        assert details["Config"]["StopTimeout"] >= 30, container.name


def test_only_the_router_is_on_a_network_with_a_way_out(stack: Stack) -> None:
    edge, backplane, engine = (f"{PROJECT}_{name}" for name in ("edge", "backplane", "engine"))
    networks = json.loads(run(["docker", "network", "inspect", edge, backplane, engine]))
    internal = {network["Name"]: network["Internal"] for network in networks}
    assert internal == {edge: False, backplane: True, engine: True}
    further = {"router": {edge}, "autoscaler": {engine}}
    for container in stack.containers():
        [details] = json.loads(run(["docker", "inspect", container.name]))
        expected = {backplane} | further.get(container.service, set())
        assert set(details["NetworkSettings"]["Networks"]) == expected, container.name


@pytest.mark.parametrize(
    ("service", "unwanted"),
    [
        ("router", ["torch", "transformers", "numpy", "gguf", "headrace_worker", "headrace_scheduler"]),
        ("scheduler", ["torch", "transformers", "tokenizers", "fastapi", "headrace_router"]),
        ("autoscaler", ["torch", "transformers", "tokenizers", "fastapi", "headrace_router"]),
        ("worker", ["fastapi", "uvicorn", "hatchling", "headrace_router", "headrace_scheduler"]),
    ],
)
def test_images_hold_only_what_the_service_needs(stack: Stack, service: str, unwanted: list[str]) -> None:
    code = f"import importlib.util as u; print([name for name in {unwanted!r} if u.find_spec(name)])"
    assert stack.execute(service, "python", "-c", code).strip() == "[]"
    compilers = "for name in cc gcc c++ clang; do command -v $name; done; true"
    assert stack.execute(service, "sh", "-c", compilers).strip() == ""


async def test_workers_come_and_go_under_load_without_a_failed_request(stack: Stack) -> None:
    async with running_load(stack.url(), MODEL, num_clients=4) as load:
        await load.wait_for_answers(4)
        await asyncio.to_thread(stack.up, "--no-recreate", "--scale", "worker=2", "worker")
        assert len(stack.containers("worker")) == 2
        assert stack.compose("logs", "scheduler").count('"worker adopted"') == 2
        await load.wait_for_answers(8)
        await asyncio.to_thread(stack.up, "--no-recreate", "--scale", "worker=1", "worker")
        assert len(stack.containers("worker")) == 1
        assert '"it leaves"' in stack.compose("logs", "scheduler")
        await load.wait_for_answers(4)
    assert load.failures == []


def test_routers_and_schedulers_scale_too(stack: Stack) -> None:
    first = free_ports(2)
    stack.up("--scale", "router=2", "--scale", "scheduler=2", ports=f"{first}-{first + 1}")
    routers = stack.containers("router")
    assert {container.health for container in [*routers, *stack.containers("scheduler")]} == {"healthy"}
    assert sorted(port for container in routers for port in container.ports) == [first, first + 1]
    for port in (first, first + 1):
        body = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(stack.url(port) + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert " four" in answer.json()["choices"][0]["text"]


def test_down_leaves_nothing_behind(stack: Stack) -> None:
    assert stack.leftovers()
    stack.down()
    assert stack.leftovers() == [], PROJECT
