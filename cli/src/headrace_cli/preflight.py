"""What can be known to fail before anything is started: port, disk, memory. Each problem is one CommandError."""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace_cli.errors import CommandError

MIB = 1024 * 1024
MAX_PORT = 65535
MIN_DISK_BYTES = 1024 * MIB
"""Room for the queue, the model cards and the logs."""
WORKER_BYTES = 700 * MIB
"""A worker with the built-in model, without its KV cache. Larger models are the worker's to check."""
SERVICE_BYTES = 90 * MIB
"""A service without torch."""
_ELSEWHERE = "choose another place with --data-dir"


def check_ports(host: str, ports: Iterable[int], option: str = "--port") -> None:
    for port in ports:
        if port > MAX_PORT:  # the library would take it modulo 65536
            raise CommandError(f"there is no port {port} for the last of the routers", f"choose a lower {option}")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise CommandError(
                f"cannot listen at {host}: {error.strerror}", "choose another address with --host"
            ) from error
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise CommandError(f"port {port} is taken", f"choose another with {option}") from error
                problem = f"cannot listen at {host}:{port}: {error.strerror}"
                raise CommandError(problem, f"choose another with --host or {option}") from error


def check_data_dir(data_dir: Path, min_bytes: int = MIN_DISK_BYTES) -> None:
    """Makes the folder, writes to it and looks how much room there is."""
    with writing_to(data_dir):
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir) as file:
            file.write(b"\0" * 4096)
        free = shutil.disk_usage(data_dir).free
    if free < min_bytes:
        problem = f"only {show_bytes(free)} free at {data_dir}, {show_bytes(min_bytes)} are needed"
        raise CommandError(problem, f"free some or {_ELSEWHERE}")


@contextlib.contextmanager
def writing_to(data_dir: Path) -> Iterator[None]:
    """An OSError is told as a CommandError."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write to {data_dir}: {error.strerror}", _ELSEWHERE) from error


@contextlib.contextmanager
def leaving_none(folder: Path) -> Iterator[None]:
    """Folders that are made on the way to this one go again, unless somebody has come to use them meanwhile."""
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


def needed_memory(num_workers: int, num_others: int, kv_cache_bytes: int) -> int:
    return num_workers * (WORKER_BYTES + kv_cache_bytes) + num_others * SERVICE_BYTES


def check_memory(needed: int, available: int | None) -> None:
    """`available`: None if nobody knows."""
    if available is not None and available < needed:
        problem = f"only {show_bytes(available)} of memory available, about {show_bytes(needed)} are needed"
        raise CommandError(problem, "use fewer --workers or a smaller --kv-cache-bytes")


def show_bytes(count: int) -> str:
    return f"{count / 1024 / MIB:.1f} GiB" if count >= 1024 * MIB else f"{count / MIB:.0f} MiB"
