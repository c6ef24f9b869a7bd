"""`headrace up` as a user meets it: start, errors, deaths, end. The services only pretend."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.cli.instance import STARTED, instance, processes_of, wait_until_gone

pytestmark = pytest.mark.nats

SERVICES = ("nats", "router", "scheduler", "worker", "autoscaler")


def test_starts_everything_and_leaves_nothing(tmp_path: Path) -> None:
    with instance(tmp_path, "--routers", "2", "--workers", "2", "--model", "/models/tiny.gguf") as up:
        up.wait_for(STARTED)
        listed = {each.id: each for each in up.ps()}
        services = [each.service for each in listed.values()]
        assert services == ["up", "nats", "router", "router", "scheduler", "worker", "worker", "autoscaler"]
        assert [each.port for each in listed.values() if each.service == "router"] == [up.port, up.port + 1]
        workers = [each for each in listed.values() if each.service == "worker"]
        assert {worker.model for worker in workers} == {"tiny"}
        assert {worker.state for worker in workers} == {"ready"}
        assert all(Path(f"/proc/{each.pid}").exists() for each in listed.values())
        said = "cpu, 32-bit floats, KV cache for 1,024 tokens, context 1,024, at most 8 sequences at a time"
        assert [f"worker-{number}: {said}" in up.output for number in (1, 2)] == [True, True]
        assert f"http://127.0.0.1:{up.port}/v1" in up.output
        assert up.interrupt() == 0
        wait_until_gone(tmp_path)
        assert up.ps() == []


def test_starts_wherever_it_is_called_and_whatever_proxies_there_are(tmp_path: Path) -> None:
    for name in ("queue", "types", "json", "headrace_router"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'this is not for you: {__file__}')")
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": ""}
    data_dir = os.fsdecode(os.fsencode(tmp_path / "José 'a'") + b"\xff")
    variables = proxies | {name.lower(): value for name, value in proxies.items()}
    with instance(tmp_path, "--data-dir", data_dir, **variables) as up:
        up.wait_for(STARTED)
        assert up.interrupt() == 0


def test_without_a_terminal_it_ends_unless_it_was_told_to_go_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        (tmp_path / "kept").mkdir()
        with instance(tmp_path / "kept") as kept:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            kept.wait_for("nats-1: running")
            kept.process.send_signal(signal.SIGHUP)
            kept.wait_for(STARTED)
            (tmp_path / "ended").mkdir()
            with instance(tmp_path / "ended") as ended:
                ended.wait_for("nats-1: running")
                ended.process.send_signal(signal.SIGHUP)
                assert ended.process.wait(timeout=90) == 0
            assert kept.interrupt() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ends_with_the_workers_own_error(tmp_path: Path) -> None:
    with instance(tmp_path, FAKE_WORKER="refuse") as up:
        assert up.process.wait(timeout=90) == 1
        assert up.output.splitlines()[-1] == "headrace up: model: no file /nowhere.gguf; check --model"
        assert "starting it again" not in up.output


def test_names_the_bad_setting_of_a_service(tmp_path: Path) -> None:
    with instance(tmp_path, FAKE_ROUTER="refuse") as up:
        assert up.process.wait(timeout=90) == 1
        assert up.output.splitlines()[-1].startswith("headrace up: HEADRACE_MAX_INFLIGHT: must be")


def test_gives_up_on_a_crash_loop(tmp_path: Path) -> None:
    with instance(tmp_path, FAKE_WORKER="crash") as up:
        assert up.process.wait(timeout=120) == 1
        last = up.output.splitlines()[-1]
        assert last.startswith("headrace up: worker-1 keeps failing (exit code 1): the device is on fire; its log is ")
        assert up.output.count("worker-1 ended") == 4


def test_shows_the_progress_of_loading_and_can_be_interrupted_meanwhile(tmp_path: Path) -> None:
    with instance(tmp_path, FAKE_WORKER="load") as up:
        up.wait_for("worker-1: loading 25 %")
        assert [each.state for each in up.ps() if each.service in ("up", "worker")] == ["starting", "loading"]
        assert up.interrupt() == 0
        assert STARTED not in up.output


def test_gives_up_without_progress(tmp_path: Path) -> None:
    with instance(tmp_path, "--start-timeout-s", "2", FAKE_WORKER="load") as up:
        assert up.process.wait(timeout=90) == 1
        assert up.output.splitlines()[-1].startswith("headrace up: no progress for 2 s; not ready: worker-1; ")


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with instance(tmp_path, "--port", str(port)) as up:
            assert up.process.wait(timeout=90) == 1
            assert up.output == f"headrace up: port {port} is taken; choose another with --port\n"


def test_an_unwritable_data_folder_is_one_line(tmp_path: Path) -> None:
    with instance(tmp_path, "--data-dir", "/proc/headrace") as up:
        assert up.process.wait(timeout=90) == 1
        assert up.output.startswith("headrace up: cannot write to /proc/headrace: ")
        assert up.output.endswith("choose another place with --data-dir\n") and up.output.count("\n") == 1


def test_too_little_memory_is_one_line(tmp_path: Path) -> None:
    with instance(tmp_path, "--workers", "2", "--kv-cache-bytes", "100TiB") as up:
        assert up.process.wait(timeout=90) == 1
        assert "of memory available, about 20480" in up.output and up.output.count("\n") == 1


def test_a_data_folder_has_one_instance(tmp_path: Path) -> None:
    with instance(tmp_path) as first:
        first.wait_for("nats-1: running")
        (tmp_path / "second").mkdir()
        with instance(tmp_path / "second", "--data-dir", str(first.data_dir)) as second:
            assert second.process.wait(timeout=90) == 1
            assert f"is in use by headrace up with pid {first.process.pid}; " in second.output
        assert first.interrupt() == 0


@pytest.mark.parametrize(("arguments", "interval"), [((), "always"), (("--sync-interval", "100ms"), "100ms")])
def test_the_broker_writes_to_disk_as_often_as_it_is_told(
    tmp_path: Path, arguments: tuple[str, ...], interval: str
) -> None:
    with instance(tmp_path, *arguments) as up:
        up.wait_for("nats-1: running")
        assert f'sync_interval: "{interval}"' in (up.data_dir / "broker" / "nats-server.conf").read_text()
        assert up.interrupt() == 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_dead_service_is_started_again(tmp_path: Path, service: str) -> None:
    with instance(tmp_path) as up:
        up.wait_for(STARTED)
        before = next(each for each in up.ps() if each.service == service)
        os.kill(before.pid, signal.SIGKILL)
        up.wait_for(f"{service}-1 ended (signal 9); starting it again in 0.5 s")
        deadline = time.monotonic() + 60
        while True:
            after = next(each for each in up.ps() if each.service == service)
            if after.num_restarts == 1 and after.state in ("ready", "running"):
                break
            assert time.monotonic() < deadline, after
            time.sleep(0.1)
        assert after.pid not in (0, before.pid) and after.id != before.id and after.port == before.port
        assert up.interrupt() == 0


def test_nothing_is_left_when_it_is_killed(tmp_path: Path) -> None:
    with instance(tmp_path, "--workers", "2") as up:
        up.wait_for(STARTED)
        assert len(processes_of(tmp_path)) == 7
        up.process.kill()
        up.process.wait()
        wait_until_gone(tmp_path)
        assert up.ps() == []


def test_a_second_interrupt_does_not_wait_for_a_stubborn_service(tmp_path: Path) -> None:
    with instance(tmp_path, FAKE_WORKER="stubborn") as up:
        up.wait_for(STARTED)
        assert [each.service for each in up.ps()].count("worker-child") == 1
        up.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert up.process.poll() is None
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=30) == 0
        wait_until_gone(tmp_path)


def test_a_stubborn_service_is_killed_after_its_time(tmp_path: Path) -> None:
    with instance(tmp_path, "--drain-timeout-s", "0", FAKE_WORKER="stubborn") as up:
        up.wait_for(STARTED)
        assert up.interrupt() == 0
        wait_until_gone(tmp_path)
