"""Calls of the engine when there is none, or it talks nonsense; what works is tested on a real one."""

import asyncio
import time
from pathlib import Path

import pytest

from headrace_autoscaler.docker_engine import BackOff, DockerEngine, EngineRefused
from headrace_autoscaler.driver import DriverError
from headrace_autoscaler.driver_settings import DriverSettings, make_driver
from headrace_autoscaler.nvml import local_gpus
from headrace_shared.errors import ConfigError
from tests.autoscaler.proxy.scripted_engine import ScriptedEngine, running_proxy


def test_failures_in_a_row_are_tried_again_later_and_later() -> None:
    back_off, now, waits = BackOff(), 100.0, []
    for _ in range(8):
        back_off.note_failure("away", now)
        with pytest.raises(DriverError, match="away; tried again in"):
            back_off.check(now)
        wait = 0.0
        while True:
            try:
                back_off.check(now + wait)
                break
            except DriverError:
                wait += 0.25
        waits.append(wait)
        now += wait
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    back_off.note_success()
    back_off.check(now)


async def test_no_engine_is_an_error_of_one_line_and_then_a_pause() -> None:
    engine = DockerEngine("http://127.0.0.1:1")
    with pytest.raises(DriverError, match=r"cannot be reached at http://127\.0\.0\.1:1: .*refused") as failed:
        await engine.containers()
    assert "\n" not in str(failed.value)
    started = time.monotonic()
    with pytest.raises(DriverError, match="tried again in"):
        await engine.containers()
    assert time.monotonic() - started < 20.0, "without asking"
    await engine.close()


async def test_the_engine_is_found_again_when_it_is_back(tmp_path: Path) -> None:
    scripted = ScriptedEngine()
    async with running_proxy(scripted, tmp_path) as port:
        engine = DockerEngine(f"http://127.0.0.1:{port}")
        assert await engine.containers() == []
    with pytest.raises(DriverError, match="cannot be reached"):
        await engine.containers()
    await asyncio.sleep(0.6)
    with pytest.raises(DriverError, match="cannot be reached"):
        await engine.containers()
    await engine.close()


async def test_a_proxy_without_an_engine_is_no_refusal(tmp_path: Path) -> None:
    async with running_proxy(ScriptedEngine(), tmp_path) as port:
        engine = DockerEngine(f"http://127.0.0.1:{port}")
        await engine.containers()
        (tmp_path / "engine.sock").unlink()
        with pytest.raises(DriverError, match="no Docker engine at") as failed:
            await engine.containers()
        assert not isinstance(failed.value, EngineRefused)
        await engine.close()


async def test_refusals_keep_their_status_and_are_followed_by_no_pause(tmp_path: Path) -> None:
    async with running_proxy(ScriptedEngine(), tmp_path) as port:
        engine = DockerEngine(f"http://127.0.0.1:{port}")
        for _ in range(2):
            with pytest.raises(EngineRefused, match="Labels") as refused:
                await engine.create("x", {})
            assert refused.value.status == 403
        assert await engine.inspect("nobody") is None
        await engine.close()


@pytest.mark.parametrize("answer", [b"<html>", b"[1, 2"])
async def test_an_answer_that_is_no_json_is_an_error(tmp_path: Path, answer: bytes) -> None:
    scripted = ScriptedEngine()
    async with running_proxy(scripted, tmp_path) as port:
        engine = DockerEngine(f"http://127.0.0.1:{port}")
        await engine.containers()
        scripted.answer = lambda call: (200, answer)
        with pytest.raises(DriverError):
            await engine.containers()
        await engine.close()


def test_gpus_are_listed_by_the_user_or_found() -> None:
    assert [gpu.id for gpu in DriverSettings(gpus=("1", "GPU-x")).inventory()()] == ["1", "GPU-x"]
    with pytest.raises(ConfigError, match="gpus: GPU 1 is listed twice"):
        DriverSettings(gpus=("1", "1")).inventory()
    assert DriverSettings().inventory() is local_gpus


def test_no_driver_is_none() -> None:
    assert make_driver(DriverSettings()) is None


async def test_a_swarm_without_a_leader_is_no_refusal_and_no_success(tmp_path: Path) -> None:
    scripted = ScriptedEngine(services=[{"ID": "svc1", "Spec": {}}])
    async with running_proxy(scripted, tmp_path, with_swarm=True) as port:
        engine = DockerEngine(f"http://127.0.0.1:{port}")
        await engine.services()
        scripted.answer = lambda call: (503, {"message": "The swarm does not have a leader."})
        with pytest.raises(DriverError, match="leader") as failed:
            await engine.update_service("svc1", 1, {})
        assert not isinstance(failed.value, EngineRefused)
        with pytest.raises(DriverError, match="tried again in"):
            await engine.services()
        await engine.close()
