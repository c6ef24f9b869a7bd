"""The life of a service: in process where that is possible, as a process where signals and exit codes matter."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from headrace_shared.codec import decode
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.health import MAX_CONNECTIONS, HealthServer
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.service import Service
from headrace_shared.subjects import telemetry_subject
from tests.patience import PATIENCE_S


async def test_the_body_ends_its_tasks() -> None:
    service = Service("router")
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("task")

    async def body(service: Service) -> None:
        service.spawn(forever(), "forever")
        await asyncio.sleep(0)

    assert await service.run(body, drain_timeout_s=1) == 0
    assert ended == ["task"]


async def test_drain_lets_the_body_finish() -> None:
    service = Service("router")

    async def body(service: Service) -> None:
        await service.draining.wait()
        await asyncio.sleep(0.05)
        finished.append(True)

    finished: list[bool] = []
    run = asyncio.create_task(service.run(body, drain_timeout_s=10))
    await asyncio.sleep(0)
    service.drain()
    assert await run == 0 and finished


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda service: service.drain(), id="drain-timeout"),
        pytest.param(lambda service: (service.drain(), service.drain()), id="second-signal"),
    ],
)
async def test_a_body_that_does_not_drain_is_cancelled(end: Callable[[Service], object]) -> None:
    service = Service("router")
    run = asyncio.create_task(service.run(lambda _: asyncio.sleep(3600), drain_timeout_s=0.05))
    await asyncio.sleep(0)
    end(service)
    assert await asyncio.wait_for(run, 20) == 0


async def test_failure_ends_at_once_with_exit_code_1() -> None:
    service = Service("router")
    run = asyncio.create_task(service.run(lambda _: asyncio.sleep(3600), drain_timeout_s=3600))
    await asyncio.sleep(0)
    service.fail("the broker is gone for good")
    service.fail("again")
    assert await asyncio.wait_for(run, 20) == 1


async def test_failure_beats_the_errors_that_follow_from_it() -> None:
    service = Service("router")

    async def body(service: Service) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("cannot clean up")

    run = asyncio.create_task(service.run(body, drain_timeout_s=1))
    await asyncio.sleep(0)
    service.fail("gone")
    assert await asyncio.wait_for(run, 20) == 1


async def test_a_failing_task_ends_the_service() -> None:
    service = Service("router")

    async def fails() -> None:
        raise ValueError("broken")

    async def body(service: Service) -> None:
        service.spawn(fails(), "fails")
        await asyncio.sleep(3600)

    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(service.run(body, drain_timeout_s=1), 20)


async def test_outer_cancellation_is_not_swallowed() -> None:
    service = Service("router")
    run = asyncio.create_task(service.run(lambda _: asyncio.sleep(3600), drain_timeout_s=1))
    await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


async def test_readiness_tells_its_reason() -> None:
    service = Service("router")
    assert service.not_ready() == "starting"
    reasons: list[str | None] = ["no broker"]
    service.set_ready(lambda: reasons[0])
    assert service.not_ready() == "no broker"
    reasons[0] = None
    assert service.not_ready() is None
    service.drain()
    assert service.not_ready() == "draining"


def test_ids_are_different_for_each_start() -> None:
    first, second = Service("router"), Service("router")
    assert first.id != second.id and first.id.startswith("router-") and len(first.id) == len("router-") + 8
    assert Service("router", "mine").id == "mine"


async def test_reports_come_every_second_and_survive_a_lost_broker() -> None:
    bus = MemoryBus()
    service = Service("router", "router-1")
    service.health_port = 7
    heard: list[Telemetry] = []
    subject = telemetry_subject("router", "router-1")
    await bus.subscribe(subject, lambda message: heard.append(decode(message.data, Telemetry)))
    report = asyncio.create_task(service.report(bus, lambda: "ready", lambda: {"num_in_flight": 2.0}, "tiny"))
    await asyncio.sleep(0.05)
    started_at = heard[0].gauges["started_at"]
    assert 0.0 <= time.time() - started_at < 60.0
    expected = {"num_in_flight": 2.0, "health_port": 7.0, "started_at": started_at}
    assert heard == [Telemetry(service="router", id="router-1", state="ready", model="tiny", gauges=expected)]
    await bus.close()
    await asyncio.sleep(1.1)
    assert not report.done()
    report.cancel()


async def test_the_health_endpoint_answers() -> None:
    reasons: list[str | None] = ["loading"]
    server = HealthServer(lambda: reasons[0], lambda: b"metric 1\n")
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/live")).status_code == 200
        refused = await client.get("/health")
        assert (refused.status_code, refused.text) == (503, "not ready: loading\n")
        reasons[0] = None
        assert (await client.get("/health?verbose=1")).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.text == "metric 1\n" and metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert (await client.head("/live")).status_code == 200
        assert (await client.get("/other")).status_code == 404
        assert (await client.post("/live", content=b"x")).status_code == 405
    await server.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize(
    "request_head", [b"\r\n\r\n", b"GET\r\n\r\n", b"\x00\xff /live\r\n\r\n", b"GET " + b"x" * 20_000]
)
async def test_the_health_endpoint_survives_nonsense(request_head: bytes) -> None:
    server = HealthServer(lambda: None, lambda: b"")
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_head)
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 20)
        assert b" 200 " not in answer and (len(request_head) < 8192 or b" 431 " in answer)
    writer.close()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/live")).status_code == 200
    await server.close()


async def test_the_health_endpoint_bounds_its_connections() -> None:
    server = HealthServer(lambda: None, lambda: b"")
    port = await server.start("127.0.0.1", 0)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /live HTTP/1.1\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"alive\n"), "who holds connections keeps no probe out"
    assert await asyncio.wait_for(idle[0][0].read(), 20) == b""
    for _, each in [*idle, (reader, writer)]:
        each.close()
    await server.close()


async def test_closing_the_health_endpoint_cuts_whoever_is_connected() -> None:
    server = HealthServer(lambda: None, lambda: b"")
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(server.close(), 20)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


PROGRAM = """
import asyncio, sys, threading, time
from headrace_shared.errors import BusUnavailable, ConfigError
from headrace_shared.service import run_service
from headrace_shared.common_settings import CommonSettings

async def body(service):
    service.set_ready()
    {body}

sys.exit(run_service(body, name="test", settings=CommonSettings(log_format="json", drain_timeout_s={drain})))
"""


class Program:
    """A service of its own process."""

    def __init__(self, tmp_path: Path, body: str, drain: float = 5.0) -> None:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip(), drain=drain))
        self.process = subprocess.Popen([sys.executable, str(path)], stderr=subprocess.PIPE, text=True)

    def wait_for(self, event: str) -> dict[str, object]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and (logged := json.loads(line))["event"] == event:
                return dict(logged)
        raise AssertionError(f"ended without saying {event!r}")

    def end(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """(exit code, the rest of stderr)"""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
        return self.process.returncode, errors


def test_sigterm_drains_and_ends_with_0(tmp_path: Path) -> None:
    program = Program(tmp_path, "await service.draining.wait()\nawait asyncio.sleep(0.2)")
    port = program.wait_for("health endpoint")["port"]
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert "headrace_asyncio_tasks" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
    program.process.send_signal(signal.SIGTERM)
    code, errors = program.end()
    assert code == 0 and '"stopped"' in errors


def test_a_terminal_that_is_closed_drains_unless_it_is_ignored(tmp_path: Path) -> None:
    program = Program(tmp_path, "await service.draining.wait()")
    program.wait_for("health endpoint")
    program.process.send_signal(signal.SIGHUP)
    code, errors = program.end()
    assert code == 0 and '"stopped"' in errors

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        program = Program(tmp_path, "await service.draining.wait()")
    finally:
        signal.signal(signal.SIGHUP, before)
    program.wait_for("health endpoint")
    program.process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    program.process.send_signal(signal.SIGTERM)
    program.wait_for("stopping")
    code, errors = program.end()
    assert code == 0 and '"stopped"' in errors and '"stopping"' not in errors


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("service", ["router", "scheduler", "worker", "autoscaler"])
def test_a_service_runs_without_standard_streams(service: str, closed: tuple[int, ...]) -> None:
    """Its sockets have other numbers then, or libuv would end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def close() -> None:
        for number in closed:
            os.close(number)

    settings = {"NATS_URL": "nats://127.0.0.1:1", "MODEL": "smollm2-135m", "PORT": port, "HEALTH_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", f"headrace_{service}"],
        env=os.environ | {f"HEADRACE_{key}": str(value) for key, value in settings.items()},
        preexec_fn=close,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        streams = {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in closed}
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert streams == {os.devnull}
    finally:
        process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    program = Program(tmp_path, "await asyncio.sleep(3600)", drain=3600)
    program.wait_for("health endpoint")
    program.process.send_signal(signal.SIGINT)
    program.wait_for("stopping")
    program.process.send_signal(signal.SIGINT)
    assert program.end()[0] == 0


def test_a_config_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code, errors = Program(tmp_path, 'raise ConfigError("model", "no file /x;\\n check it")').end()
    assert code == 2
    assert errors.splitlines()[-1] == "headrace-test: model: no file /x; check it"


def test_an_error_of_ours_is_told_without_traceback(tmp_path: Path) -> None:
    code, errors = Program(tmp_path, 'raise BusUnavailable("nobody there")').end()
    assert code == 1 and "Traceback" not in errors and "exception" not in errors
    assert json.loads(errors.splitlines()[-1])["reason"] == "nobody there"


def test_what_was_loaded_before_it_was_ready_is_not_searched_for_garbage_again(tmp_path: Path) -> None:
    body = 'import gc\nraise BusUnavailable(f"{gc.get_freeze_count() > len(gc.get_objects())}")'
    code, errors = Program(tmp_path, body).end()
    assert code == 1 and json.loads(errors.splitlines()[-1])["reason"] == "True", errors


def test_a_bug_is_told_with_traceback(tmp_path: Path) -> None:
    code, errors = Program(tmp_path, "1 / 0").end()
    assert code == 1 and "ZeroDivisionError" in errors


@pytest.mark.parametrize(
    "body",
    [
        "threading.Thread(target=time.sleep, args=(3600,)).start()\nawait service.draining.wait()",
        "await asyncio.to_thread(time.sleep, 3600)",
        """
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
        """,
    ],
    ids=["thread", "executor", "ignores-cancellation"],
)
def test_it_ends_whatever_hangs(tmp_path: Path, body: str) -> None:
    program = Program(tmp_path, body, drain=0.1)
    program.wait_for("health endpoint")
    program.process.send_signal(signal.SIGTERM)
    program.end(timeout_s=60)
