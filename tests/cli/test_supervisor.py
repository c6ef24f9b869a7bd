"""What dies is started again, as long as that makes sense."""

import asyncio
import time
from pathlib import Path

import pytest

from headrace_cli import restarts
from headrace_cli.errors import CommandError
from headrace_cli.process import ProcessSpec
from headrace_cli.restarts import MAX_SHORT_LIVES
from headrace_cli.supervisor import Supervisor


class Mortal:
    """Dies as soon as it lives, `num_lives` times; then it lives on."""

    def __init__(self, num_lives: int) -> None:
        self.spec = ProcessSpec("router", "router-1", (), {})
        self.id = "router-1"
        self.pid = 0
        self.num_starts = 0
        self.started_at = 0.0
        self.phase = "stopped"
        self.port = 0
        self.log_path = Path("router-1.log")
        self.is_alive = False
        self.survives = asyncio.Event()
        self._num_lives = num_lives

    async def start(self) -> None:
        self.num_starts += 1
        self.started_at = time.monotonic()
        self.phase = "running"
        self.is_alive = True

    async def wait(self) -> int:
        if self.num_starts > self._num_lives:
            self.survives.set()
            await asyncio.Event().wait()
        self.is_alive = False
        return -9

    def last_line(self) -> str:
        return ""

    def trim_log(self) -> None: ...

    async def stop(self, timeout_s: float) -> None: ...

    async def kill(self) -> None: ...


@pytest.fixture
async def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(restarts, "MIN_DELAY_S", 0.0)
    return Supervisor(was_ready=lambda _: True, on_event=lambda _: None)


async def test_what_has_served_is_started_again_however_often_it_is_killed(supervisor: Supervisor) -> None:
    supervisor.has_started = True
    process = Mortal(3 * MAX_SHORT_LIVES)
    await supervisor.start(process)
    failure = asyncio.create_task(supervisor.failure())
    async with asyncio.timeout(30):
        await process.survives.wait()
    assert not failure.done() and process.phase == "running"
    failure.cancel()
    await supervisor.stop(("router",), 0.0, asyncio.Event())


async def test_what_dies_again_and_again_before_all_is_there_is_given_up(supervisor: Supervisor) -> None:
    process = Mortal(3 * MAX_SHORT_LIVES)
    await supervisor.start(process)
    with pytest.raises(CommandError, match=r"router-1 keeps failing \(signal 9\)"):
        async with asyncio.timeout(30):
            await supervisor.failure()
    assert process.num_starts == MAX_SHORT_LIVES
    await supervisor.stop(("router",), 0.0, asyncio.Event())
