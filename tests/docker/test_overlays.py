"""What is laid over docker-compose.yml composes to what it promises. Needs the compose command but no engine."""

import json
from typing import Any

import pytest

from tests.docker.engine import ROOT, compose_command, run, why_unavailable

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

SERVICES = ("router", "scheduler", "worker", "autoscaler")
ALWAYS = {*SERVICES, "init"}
BROKERS = ("nats-1", "nats-2", "nats-3")


def composed(overlay: str = "", *options: str) -> dict[str, Any]:
    if why_unavailable() is not None:
        pytest.skip("no Docker on this machine")
    files = ["--file", str(ROOT / "docker-compose.yml")]
    files += ["--file", str(ROOT / "deploy" / overlay)] if overlay else []
    command = [*compose_command(), *files, *options, "config", "--format", "json"]
    services: dict[str, Any] = json.loads(run(command))["services"]
    return services


def test_three_brokers_replace_the_one() -> None:
    services = composed("compose.ha.yaml")
    assert set(services) == {*ALWAYS, *BROKERS}
    for name in SERVICES:
        environment = services[name]["environment"]
        assert environment["HEADRACE_NATS_URL"] == ",".join(f"nats://{broker}:4222" for broker in BROKERS)
        assert environment["HEADRACE_NATS_REPLICAS"] == "3"
        assert environment["HEADRACE_LOG_FORMAT"] == "json", "what the file below sets is kept"
        assert set(services[name]["depends_on"]) == set(BROKERS)
    stores = [mount for broker in BROKERS for mount in services[broker]["volumes"] if mount["target"] == "/data"]
    volumes = {mount["source"] for mount in stores}
    assert len(volumes) == len(BROKERS), "each broker has a store of its own"
    for broker in BROKERS:
        assert services[broker]["environment"]["NATS_SERVER_NAME"] == broker
        assert services[broker]["read_only"] and services[broker]["cap_drop"] == ["ALL"]


def test_with_the_overlay_everything_is_encrypted() -> None:
    services = composed("compose.tls.yaml", "--profile", "tools")
    assert "--tls" in services["init"]["command"]
    for name in (*SERVICES, "cli"):
        environment = services[name]["environment"]
        assert environment["HEADRACE_BROKER_CA"] == "/run/headrace/ca.pem"
        assert environment["HEADRACE_BROKER_CREDENTIALS"] == "/run/headrace/user.nk", "what the file below sets is kept"


def test_workers_of_the_gpu_overlay_reserve_a_gpu() -> None:
    worker = composed("compose.gpu.yaml")["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert worker["environment"]["HEADRACE_DEVICE"] == "cuda"


def test_a_second_model_has_a_worker_and_a_scheduler_of_its_own() -> None:
    services = composed("compose.models.yaml")
    assert set(services) >= {*SERVICES, "worker-small", "scheduler-small"}
    for first, second in (("worker", "worker-small"), ("scheduler", "scheduler-small")):
        environment, other = services[first]["environment"], services[second]["environment"]
        assert other["HEADRACE_SERVED_NAME"] == "small" != environment["HEADRACE_SERVED_NAME"]
        assert other["HEADRACE_NATS_URL"] == environment["HEADRACE_NATS_URL"]
        assert services[second]["read_only"] and services[second]["cap_drop"] == ["ALL"]
        assert services[second]["depends_on"] == services[first]["depends_on"]


def test_the_observability_profile_adds_what_takes_traces_and_metrics() -> None:
    added = {"collector", "jaeger", "prometheus", "grafana", "nats-exporter"}
    assert set(composed()) == {*ALWAYS, "nats"}
    services = composed("", "--profile", "observability")
    assert set(services) == {*ALWAYS, "nats", *added}
    for name in added:
        service = services[name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["mem_limit"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name
    assert services["nats-exporter"]["network_mode"] == "service:nats"
