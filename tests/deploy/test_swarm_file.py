"""The stack for Swarm is docker-compose.yml in the other format: what is the same in both must stay so."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace_autoscaler.proxy.settings import ProxySettings
from headrace_autoscaler.settings import AutoscalerSettings
from headrace_worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
TEXT = (ROOT / "deploy/compose.swarm.yaml").read_text()
SWARM = yaml.safe_load(TEXT)
NAMES = sorted(COMPOSE["services"])

ONLY_COMPOSE = {"HEADRACE_GPUS", "HEADRACE_MIN_PARKED", "HEADRACE_MAX_PARKED"}
"""Swarm hands out GPUs itself, and its replicas are all alike."""
ONLY_SWARM = {"HEADRACE_SERVICE_ID", "HEADRACE_SWARM"}
DIFFERENT = {"HEADRACE_DRIVER", "HEADRACE_PROJECT", "HEADRACE_REQUIRE_KEYS"}


def pair(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return COMPOSE["services"][name], SWARM["services"][name]


def test_both_have_the_same_services_networks_and_volumes() -> None:
    """But for `init`: what it makes is a stack's secrets."""
    unprofiled = {"", "autoscale"}
    expected = [name for name in NAMES if set(COMPOSE["services"][name].get("profiles", [""])) <= unprofiled]
    assert sorted(SWARM["services"]) == [name for name in expected if name != "init"]
    assert set(SWARM["networks"]) == set(COMPOSE["networks"])
    for name, network in SWARM["networks"].items():
        assert network.get("internal", False) == COMPOSE["networks"][name].get("internal", False), name
    assert set(SWARM["volumes"]) <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", sorted(SWARM["services"]))
def test_services_are_the_same(name: str) -> None:
    compose, swarm = pair(name)
    for key in ("networks", "read_only", "cap_drop", "stop_grace_period", "logging", "user", "entrypoint"):
        assert swarm.get(key) == compose.get(key), key
    limits = swarm["deploy"]["resources"]["limits"]
    assert (limits["memory"], limits["pids"]) == (compose["mem_limit"], compose["pids_limit"])


@pytest.mark.parametrize("name", sorted(SWARM["services"]))
def test_settings_are_the_same(name: str) -> None:
    compose, swarm = (service.get("environment", {}) for service in pair(name))
    assert set(swarm) - ONLY_SWARM == set(compose) - ONLY_COMPOSE
    for key in set(swarm) & set(compose) - DIFFERENT:
        assert swarm[key] == compose[key], key


def test_settings_of_the_autoscaler_exist() -> None:
    names = {f"HEADRACE_{field.name.upper()}" for field in msgspec.structs.fields(AutoscalerSettings)}
    assert _own(COMPOSE["services"]["autoscaler"]["environment"]) <= names
    names = {f"HEADRACE_{field.name.upper()}" for field in msgspec.structs.fields(ProxySettings)}
    assert _own(COMPOSE["services"]["docker-proxy"]["environment"]) <= names


def test_what_users_can_set_is_listed() -> None:
    """Every variable of compose files is explained in .env.example, and nothing else but Compose's own."""
    files = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("compose.*.yaml"))]
    used = {name for file in files for name in re.findall(r"\$\{([A-Z][A-Z_]+)", file.read_text())}
    listed = set(re.findall(r"^#?([A-Z_]+)=", (ROOT / "deploy/.env.example").read_text(), re.MULTILINE))
    assert len(files) == 6 and used - listed == {"COMPOSE_PROJECT_NAME"} and listed - used == {"COMPOSE_PROFILES"}


def test_adapters_can_be_switched_on() -> None:
    wanted = {"HEADRACE_LORA", "HEADRACE_LORA_DIR", "HEADRACE_MAX_LORAS"}
    assert wanted <= {f"HEADRACE_{field.name.upper()}" for field in msgspec.structs.fields(WorkerSettings)}
    assert wanted <= set(COMPOSE["services"]["worker"]["environment"])


def test_a_router_on_every_node_asks_for_keys() -> None:
    setting = SWARM["services"]["router"]["environment"]["HEADRACE_REQUIRE_KEYS"]
    assert setting == "${HEADRACE_REQUIRE_KEYS:-true}"


def test_secrets_are_where_the_commands_of_the_file_put_them() -> None:
    """Paths in a stack file start at its own folder, those in commands where the commands run: the repository."""
    commands = [line for line in TEXT.splitlines() if line.startswith("#   headrace init")]
    made = {(ROOT / re.findall(r"--dir (\S+)", line)[0]).resolve() for line in commands}
    read = {(ROOT / "deploy" / default).resolve() for default in re.findall(r"HEADRACE_SECRETS:-([^}]+)}", TEXT)}
    assert made == read == {ROOT / "secrets"}


def test_what_the_autoscaler_reads_is_there() -> None:
    worker = SWARM["services"]["worker"]
    assert worker["deploy"]["labels"] == {"com.headrace.role": "worker"}
    assert worker["environment"]["HEADRACE_SERVICE_ID"] == "worker-{{.Task.ID}}"
    assert worker["deploy"]["restart_policy"] == {"condition": "on-failure"}, "who has drained is not started again"


def test_only_the_proxy_has_the_engines_socket() -> None:
    for file in (COMPOSE, SWARM):
        with_socket = [
            name for name, service in file["services"].items() if "docker.sock" in str(service.get("volumes"))
        ]
        assert with_socket == ["docker-proxy"]
        assert file["services"]["docker-proxy"]["networks"] == ["engine"]
        on_engine = {name for name, service in file["services"].items() if "engine" in str(service.get("networks"))}
        assert on_engine == {"docker-proxy", "autoscaler"}, "nobody else reaches it"


def _own(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("HEADRACE_")}
