"""The nats-server that we start ourselves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace_shared import broker
from headrace_shared.broker import NatsServer, find_nats_server
from headrace_shared.errors import BusUnavailable, ConfigError

pytestmark = pytest.mark.nats


async def test_it_is_ready_on_a_free_loopback_port_when_started(nats_server: NatsServer) -> None:
    assert nats_server.url == f"nats://127.0.0.1:{nats_server.port}" and nats_server.port > 0
    assert nats_server.pid is not None and await nats_server.is_healthy()
    reader, writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
    assert b'"jetstream":true' in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_its_folder_may_have_any_name(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / os.fsdecode("José 日本 'a' \"b\" \\ $HOME #;{%}\n".encode() + b"\xff"))
    await server.start()
    await server.stop()
    assert (server.data_dir / "store" / "jetstream").is_dir() and server.log_path.stat().st_size > 0


async def test_what_it_complains_of_before_it_has_a_log_is_told(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, access="nonsense {")
    with pytest.raises(BusUnavailable, match="Parse error"):
        await server.start()


async def test_it_keeps_its_ports_over_a_crash_and_a_stop(nats_server: NatsServer) -> None:
    url, pid = nats_server.url, nats_server.pid
    await nats_server.kill()
    assert nats_server.pid is None and not await nats_server.is_healthy()
    assert await nats_server.wait() == -signal.SIGKILL
    await nats_server.start()
    assert nats_server.url == url and nats_server.pid != pid
    await nats_server.stop()
    await nats_server.stop()
    assert nats_server.pid is None
    await nats_server.start()
    assert nats_server.url == url and await nats_server.is_healthy()


async def test_a_paused_one_hangs_until_resumed_and_can_be_stopped(nats_server: NatsServer) -> None:
    nats_server.pause()
    await asyncio.sleep(0.1)
    assert not await nats_server.is_healthy()
    nats_server.resume()
    assert await nats_server.is_healthy()
    nats_server.pause()
    started = time.monotonic()
    await nats_server.stop()
    assert nats_server.pid is None and time.monotonic() - started < 20.0


async def test_a_taken_port_is_reported_in_one_line(nats_server: NatsServer, tmp_path: Path) -> None:
    second = NatsServer(tmp_path / "second", port=nats_server.port)
    with pytest.raises(BusUnavailable, match="address already in use") as caught:
        await second.start()
    assert "\n" not in str(caught.value) and second.pid is None


async def test_a_store_has_one_server(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if whoever started the first one is dead, and it takes its time to end."""
    second = NatsServer(nats_server.data_dir)
    with monkeypatch.context() as patch:
        patch.setattr(broker, "LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(BusUnavailable, match=f"another nats-server still uses {nats_server.data_dir}"):
            await second.start()
    assert second.pid is None and await nats_server.is_healthy()
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0.1)
    assert second.pid is None
    await nats_server.kill()
    await starting
    assert await second.is_healthy()
    await second.kill()


async def test_a_binary_that_is_no_nats_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match="did not start"):
        await NatsServer(tmp_path, binary=Path("/bin/false")).start()


async def test_a_missing_nats_server_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nats-server"):
        find_nats_server()


async def test_the_configuration_is_private_and_its_values_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" folder'
    server = NatsServer(folder)
    await server.start()
    assert (folder / "nats-server.conf").stat().st_mode & 0o077 == 0
    assert any((folder / "store").iterdir())
    await server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child to its parent")
def test_it_ends_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from headrace_shared import broker
from headrace_shared.broker import NatsServer

async def main():
    server = NatsServer(Path(sys.argv[1]))
    await server.start()
    sys.stdout.write(f"{server.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _is_alive(pid)
        parent.kill()
    deadline = time.monotonic() + 5.0
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"  # dead, and nobody has asked yet
