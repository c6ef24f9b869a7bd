"""Every service of every compose file runs confined: what one file says, no other takes back."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.name: path for path in (ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("compose*.yaml")))}
BASE = "docker-compose.yml"
SWARM = "compose.swarm.yaml"

ROOT_USERS = {"docker-proxy"}
"""It owns the engine's socket, has no capability, and lets a few calls through (`headrace_autoscaler.proxy`)."""
SOCKET_OWNERS = {"docker-proxy"}
FORBIDDEN = {
    "privileged",
    "cap_add",
    "devices",
    "device_cgroup_rules",
    "pid",
    "ipc",
    "uts",
    "userns_mode",
    "cgroup",
    "cgroup_parent",
    "oom_kill_disable",
    "extra_hosts",
    "sysctls",
    "links",
    "env_file",
    "group_add",
}
"""No service of ours has a use for them."""
SECRET = re.compile(r"(PASSWORD|SECRET|TOKEN|SEED|API_KEY|PRIVATE)", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """Also reads compose's own tags."""


def _tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return None


_Loader.add_multi_constructor("!", _tagged)
CONTENT: dict[str, dict[str, Any]] = {name: yaml.load(path.read_text(), _Loader) for name, path in FILES.items()}
SERVICES = [
    (file, name)
    for file, content in CONTENT.items()
    for name, service in content["services"].items()
    if service is not None
]
WHOLE = [(file, name) for file, name in SERVICES if file in (BASE, SWARM) or name not in CONTENT[BASE]["services"]]
"""Services that a file defines; others are changes to those of docker-compose.yml."""


def resolved(file: str, name: str) -> dict[str, Any]:
    service: dict[str, Any] = CONTENT[file]["services"][name]
    extended = service.get("extends")
    if extended is None:
        return service
    return {**resolved(Path(extended["file"]).name, extended["service"]), **service}


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_no_service_gets_more_than_it_may(file: str, name: str) -> None:
    service = CONTENT[file]["services"][name]
    assert not FORBIDDEN & set(service)
    assert service.get("cap_drop", ["ALL"]) == ["ALL"]
    assert service.get("read_only", True) is True
    assert service.get("network_mode", "none") in ("none", "service:nats"), "never the host's"
    options = service.get("security_opt", [])
    assert set(options) <= {"no-new-privileges:true"}, "the engine's own seccomp profile stays on"
    for volume in service.get("volumes", ()):
        source = volume if isinstance(volume, str) else volume.get("source", "")
        if "docker.sock" in source:
            assert name in SOCKET_OWNERS
        assert not re.match(r"(/|~|\.\.)", source), "no folder of the host but what the user names"


@pytest.mark.parametrize(("file", "name"), WHOLE)
def test_every_service_is_confined(file: str, name: str) -> None:
    service = resolved(file, name)
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    if file == SWARM:  # whose format knows neither; no-new-privileges is the daemon's there
        limits = service["deploy"]["resources"]["limits"]
        assert limits["memory"] and 0 < limits["pids"] <= 512
    else:
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"] and 0 < service["pids_limit"] <= 512


@pytest.mark.parametrize(("file", "name"), WHOLE)
def test_nobody_is_root(file: str, name: str) -> None:
    service = resolved(file, name)
    user = service.get("user")
    if user is None:
        image = service.get("image", "")
        folder = image.rpartition("-")[2] if file == SWARM else ""
        dockerfile = service["build"]["dockerfile"] if "build" in service else _dockerfile(folder)
        users = re.findall(r"^USER (\S+)$", (ROOT / dockerfile).read_text(), re.MULTILINE)
        assert users, f"{dockerfile} names no user"
        user = users[-1]
    is_root = user.partition(":")[0] in ("0", "root")
    assert is_root is (name in ROOT_USERS)


def _dockerfile(folder: str) -> str:
    return {"nats": "deploy/nats/Dockerfile"}.get(folder, f"services/{folder}/Dockerfile")


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_what_can_be_written_is_bounded(file: str, name: str) -> None:
    for entry in CONTENT[file]["services"][name].get("tmpfs", ()):
        assert re.search(r"size=\d+[mg]", entry), entry
    for volume in CONTENT[file]["services"][name].get("volumes", ()):
        if isinstance(volume, dict) and volume["type"] == "tmpfs":
            assert volume["tmpfs"]["size"] > 0


@pytest.mark.parametrize("file", [BASE, SWARM])
def test_only_routers_and_pages_for_people_have_a_way_out(file: str) -> None:
    content = CONTENT[file]
    outward = {name for name, network in content["networks"].items() if not (network or {}).get("internal")}
    assert outward == {"edge"}
    reaching = {
        name
        for name, service in content["services"].items()
        if "network_mode" not in service and outward & set(service.get("networks", outward))
    }
    assert reaching <= {"router", "jaeger", "prometheus", "grafana"} and "router" in reaching


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_ports_are_published_for_this_machine_only_unless_the_user_says_so(file: str, name: str) -> None:
    ports = CONTENT[file]["services"][name].get("ports", ())
    if file == SWARM:
        assert not ports or name == "router"
        return
    for port in ports:
        assert port.startswith(("127.0.0.1:", "${HEADRACE_BIND:-127.0.0.1}:")), port


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_no_secret_is_in_a_command_or_written_down(file: str, name: str) -> None:
    """Commands and environments are what `docker inspect` shows. Grafana knows passwords from its environment only."""
    service = CONTENT[file]["services"][name]
    command = " ".join(map(str, [*(service.get("command") or []), *(service.get("entrypoint") or [])]))
    assert not re.search(r"passw|token|seed|api.?key", command, re.IGNORECASE)
    environment = service.get("environment", {})
    assert isinstance(environment, dict)
    for variable, value in environment.items():
        if SECRET.search(variable) and not variable.endswith("_FILE"):
            assert variable == "GF_SECURITY_ADMIN_PASSWORD", variable
            assert str(value).startswith("${"), "the user's own"


def test_images_of_others_have_a_version() -> None:
    for content in CONTENT.values():
        for name, service in content["services"].items():
            image = (service or {}).get("image", "")
            if "/" in image and "HEADRACE_IMAGES" not in image:
                assert re.search(r":(\$\{[A-Z_]+:-)?v?\d+\.\d+\.\d+\}?$", image), name
