"""`headrace ps`: every process of the running instances."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from headrace_cli.settings import PsSettings, base_data_dir
from headrace_cli.state_file import STATE_FILE, InstanceState, ProcessState, read_state, readable
from headrace_shared.settings import load_settings


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `service` is up for `headrace up` itself, and `<service>-child` for a process of a service's own."""

    service: str
    id: str
    pid: int
    state: str
    model: str
    port: int | None
    health_port: int | None
    num_restarts: int
    log: str
    data_dir: str


class Instance(NamedTuple):
    data_dir: Path
    state: InstanceState


def run(argv: Sequence[str]) -> int:
    settings = load_settings(
        PsSettings,
        argv,
        os.environ,
        prog="headrace ps",
        description="Lists every process of the instances that `headrace up` runs.",
    )
    listed = [each for instance in find_instances(settings.data_dir, os.environ) for each in list_processes(instance)]
    if settings.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(listed)).decode() + "\n")
    elif not listed:
        place = settings.data_dir or base_data_dir(os.environ)
        sys.stdout.write(f"No instance is running in {readable(Path(place))}. Start one with `headrace up`")
        sys.stdout.write(".\n" if settings.data_dir else ", or name the folder of another with --data-dir.\n")
    else:
        sys.stdout.write(_table(listed))
    return 0


def find_instances(data_dir: str, environ: Mapping[str, str]) -> list[Instance]:
    """The running instances: of one data folder, or of all in the default place."""
    if data_dir:
        folders = [Path(data_dir).expanduser().absolute()]
    else:
        folders = sorted(path.parent for path in base_data_dir(environ).glob(f"*/{STATE_FILE}"))
    return [Instance(folder, state) for folder in folders if (state := read_state(folder)) is not None]


def list_processes(instance: Instance) -> list[Listed]:
    data_dir, state = readable(instance.data_dir), instance.state
    up = ProcessState(service="up", id=f"up-{state.pid}", pid=state.pid, state=state.state, model=state.model)
    listed = []
    for process in (up, *state.processes):
        values = {name: getattr(process, name) for name in process.__struct_fields__ if name != "birth"}
        listed.append(Listed(**values, data_dir=data_dir))
        if process is not up:
            listed += [
                Listed(
                    **{**values, "service": f"{process.service}-child", "pid": pid, "port": None, "health_port": None},
                    data_dir=data_dir,
                )
                for pid in _children(process.pid)
            ]
    return listed


def _table(listed: Sequence[Listed]) -> str:
    rows = [["SERVICE", "ID", "PID", "STATE", "MODEL", "PORT", "RESTARTS"]]
    for each in listed:
        port = str(each.port or "")
        rows.append([each.service, each.id, str(each.pid), each.state, each.model, port, str(each.num_restarts)])
    if len({each.data_dir for each in listed}) > 1:  # by it commands are told which of the instances is meant
        for row, each in zip(rows[1:], listed, strict=True):
            row.append(each.data_dir if each.service == "up" else "")
        rows[0].append("DATA DIR")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _children(pid: int) -> list[int]:
    if not pid:
        return []
    try:
        return sorted(child.pid for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []
