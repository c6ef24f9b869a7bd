"""The broker among the supervised processes: when it is restarted, and how often."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from headrace_cli import broker_process
from headrace_cli.broker_process import BrokerProcess
from headrace_cli.fleet_view import FleetView
from headrace_cli.supervisor import Supervisor
from headrace_shared.broker import NatsServer
from tests.integration.deployment import until

pytestmark = pytest.mark.nats

WRITE_ERROR = (
    b'{"status":"unavailable","error":"JetStream stream \'$G > REQUESTS\' write error: write 1.blk: '
    b'no space left on device"}'
)
"""As nats-server 2.15.1 says it."""


class _Usage(NamedTuple):
    free: int


async def test_a_broker_that_lives_long_between_its_deaths_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes no telemetry that could say that it is ready."""
    monkeypatch.setattr("headrace_cli.restarts.STABLE_LIFE_S", 0.0)
    broker = BrokerProcess(NatsServer(tmp_path))
    supervised = Supervisor(FleetView().was_ready, lambda _: None)
    await supervised.start(broker)
    try:
        for number in range(1, 8):
            await broker.kill()
            for _ in range(3000):
                if broker.num_starts > number and broker.phase == "running":
                    break
                await asyncio.sleep(0.02)
            assert broker.is_alive, f"given up after death {number}"
    finally:
        await supervised.stop(("nats",), 1.0, asyncio.Event())


async def test_a_broker_that_cannot_store_is_restarted_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NatsServer(tmp_path)
    broker = BrokerProcess(server)
    room = 0
    monkeypatch.setattr(broker_process, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(room))

    async def problem() -> str:
        return "write error: no space left on device"

    monkeypatch.setattr(server, "storage_problem", problem)
    await broker.start()
    waiting = asyncio.create_task(broker.wait())
    try:
        await asyncio.sleep(0.3)
        assert not waiting.done() and broker.is_alive
        room = broker_process.MIN_ROOM_BYTES
        await asyncio.wait_for(waiting, 30)
        assert not broker.is_alive
    finally:
        waiting.cancel()
        await server.kill()


async def test_a_broker_that_ends_on_a_full_disk_is_started_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: starts that must fail would have it given up."""
    room = broker_process.MIN_ROOM_BYTES
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(room))
    monkeypatch.setattr(broker_process, "ROOM_PERIOD_S", 0.02)
    said: list[str] = []
    broker = BrokerProcess(NatsServer(tmp_path), said.append)
    supervised = Supervisor(FleetView().was_ready, lambda _: None)
    await supervised.start(broker)
    try:
        room = 1024 * 1024
        await broker.kill()
        await until(lambda: bool(said))
        await asyncio.sleep(0.1)
        assert not broker.is_alive and broker.num_starts == 1
        assert said == [f"nats-1 waits for room on the disk: 1 MiB free at {tmp_path}"]
        room = broker_process.MIN_ROOM_BYTES
        await until(lambda: broker.phase == "running")
        assert broker.is_alive and broker.num_starts == 2
    finally:
        await supervised.stop(("nats",), 1.0, asyncio.Event())


async def test_a_folder_in_which_nothing_can_be_written_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "nats-server.conf").mkdir()
    with pytest.raises(OSError, match="cannot write"):
        await BrokerProcess(NatsServer(tmp_path)).start()


@pytest.mark.parametrize(
    ("answer", "is_told"),
    [
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\n" + WRITE_ERROR, True),
        (b'HTTP/1.0 503 Service Unavailable\r\n\r\n{"error":"JetStream stream is not current"}', False),
        (b'HTTP/1.0 200 OK\r\n\r\n{"status":"ok"}', False),
        (b"", False),
    ],
    ids=["write error", "something else", "healthy", "no answer"],
)
async def test_only_a_write_error_counts_as_a_problem_of_the_storage(
    tmp_path: Path, answer: bytes, is_told: bool
) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    monitor = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with monitor:
        server = NatsServer(tmp_path, monitor_port=monitor.sockets[0].getsockname()[1])
        assert ("no space left" in await server.storage_problem()) is is_told
        assert await server.is_healthy() is (b" 200 " in answer)
