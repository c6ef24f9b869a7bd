"""Workers that an autoscaler has `headrace up` start and stop: real processes, asked for over the real socket."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from headrace_autoscaler.driver import DriverError, Fenced, InstanceState, NoCapacity
from headrace_autoscaler.process_driver import ProcessDriver
from headrace_cli.autoscaler_process import AutoscalerProcess
from headrace_cli.errors import CommandError
from headrace_cli.plan import Plan
from headrace_cli.process import ProcessSpec, Supervised
from headrace_cli.supervisor import Supervisor
from headrace_cli.worker_fleet import WorkerFleet
from headrace_shared.errors import ConfigError
from headrace_shared.messages import WorkerId

LIVES = "import signal, time; signal.signal(15, lambda *_: exit(0)); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"


def spec(service: str, code: str) -> ProcessSpec:
    environ = {"PATH": os.environ["PATH"]}
    return ProcessSpec(service, f"{service}-1", (sys.executable, "-c", code), environ, model="tiny")


class Bench:
    def __init__(self, folder: Path, code: str, num_places: int) -> None:
        self.events: list[str] = []
        self.supervisor = Supervisor(lambda _: True, self.events.append)
        self.supervisor.has_started = True
        places = tuple({"PLACE": str(number)} for number in range(num_places))
        plan = Plan([], [], [spec("worker", code)], [], places)
        self.fleet = WorkerFleet(self.supervisor, plan, folder)
        ours, theirs = socket.socketpair()
        self._server = AutoscalerProcess(spec("autoscaler", LIVES), folder, self.fleet)
        self.serving = asyncio.create_task(self._server._serve(ours))
        self.driver = ProcessDriver(theirs.detach())

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, folder: Path, code: str = LIVES, num_places: int = 2) -> "AsyncIterator[Bench]":
        bench = cls(folder, code, num_places)
        try:
            yield bench
        finally:
            await bench.driver.close()
            await bench.serving
            bench.fleet.close()
            pids = [process.pid for process in bench.supervisor.processes if process.is_alive]
            at_once = asyncio.Event()
            at_once.set()
            await bench.supervisor.stop(("worker",), 0.0, at_once)
            assert not [pid for pid in pids if psutil.pid_exists(pid)]

    def process(self, worker: str) -> Supervised:
        return next(process for process in self.supervisor.processes if process.id == worker)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.02)


A, B, C = WorkerId("worker-a"), WorkerId("worker-b"), WorkerId("worker-c")


async def test_a_worker_is_started_once_under_its_name_listed_and_stopped(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        assert await bench.driver.instances() == []
        started = await bench.driver.start("tiny", A, 1)
        again = await bench.driver.start("tiny", A, 1)
        assert started == again and started.is_managed and started.state is InstanceState.RUNNING
        assert await bench.driver.instances() == [started]
        process = bench.process(A)
        environ = psutil.Process(process.pid).environ()
        assert environ["HEADRACE_SERVICE_ID"] == A and environ["PLACE"] == "0" and "HEADRACE_PARKED" not in environ
        await bench.driver.stop(started, 5.0)
        await bench.driver.stop(started, 5.0)
        assert await bench.driver.instances() == [] and bench.supervisor.processes == []
        assert not psutil.pid_exists(process.pid) and bench.events == []


async def test_each_has_a_place_of_its_own_and_there_are_no_more(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        a = await bench.driver.start("tiny", A, 1)
        await bench.driver.start("tiny", B, 1, parked=True)
        environ = psutil.Process(bench.process(B).pid).environ()
        assert environ["PLACE"] == "1" and environ["HEADRACE_PARKED"] == "true"
        with pytest.raises(NoCapacity, match="2 workers run"):
            await bench.driver.start("tiny", C, 1)
        await bench.driver.stop(a, 5.0)
        await bench.driver.start("tiny", C, 1)
        assert psutil.Process(bench.process(C).pid).environ()["PLACE"] == "0"


async def test_who_leads_no_more_and_who_asks_for_another_model_is_refused(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        await bench.driver.start("tiny", A, 7)
        with pytest.raises(Fenced, match="generation 6 is out of date"):
            await bench.driver.start("tiny", B, 6)
        with pytest.raises(DriverError, match="serves tiny, not large"):
            await bench.driver.start("large", B, 7)
        assert len(await bench.driver.instances()) == 1


async def test_one_that_dies_stays_listed_until_it_is_removed(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        dead = await bench.driver.start("tiny", A, 1)
        os.kill(bench.process(A).pid, signal.SIGKILL)
        await until(lambda: bench.fleet.list()[0].exit_code is not None)
        (instance,) = await bench.driver.instances()
        assert instance.state is InstanceState.EXITED and instance.exit_code == -9
        assert bench.events == ["worker-1 ended (signal 9)"]
        await bench.driver.stop(dead, 0.0)
        assert await bench.driver.instances() == []


async def test_one_that_does_not_stop_is_killed_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    async with Bench.of(tmp_path, STUBBORN) as bench:
        stubborn = await bench.driver.start("tiny", A, 1)
        await until(lambda: psutil.Process(bench.process(A).pid).cmdline()[1] == "-c")
        await asyncio.sleep(0.5)  # until it ignores the signal
        stopping = asyncio.create_task(bench.driver.stop(stubborn, 1.0))
        await until(lambda: bench.fleet.list()[0].is_stopping)
        assert (await bench.driver.instances())[0].state is InstanceState.STOPPING
        await bench.driver.start("tiny", B, 1)
        await stopping
        assert [each.worker for each in await bench.driver.instances()] == [B]


async def test_what_is_being_started_when_the_autoscaler_dies_is_there_for_the_next_one(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        question = asyncio.create_task(bench.driver.start("tiny", A, 1))
        while not bench.fleet.list():  # noqa: ASYNC110 - the start is to be under way, no later
            await asyncio.sleep(0)
        await bench.driver.close()  # as when the process is killed
        await bench.serving
        with pytest.raises(DriverError, match="closed the connection"):
            await question
        assert [each.worker for each in bench.fleet.list()] == [A] and bench.process(A).is_alive


async def test_a_stop_that_overtakes_a_start_leaves_nothing(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        start = asyncio.create_task(bench.fleet.start("tiny", A, 1))
        await asyncio.sleep(0)
        await bench.fleet.stop(A, 5.0)
        await start
        assert bench.fleet.list() == () and bench.supervisor.processes == []


async def test_nothing_is_started_while_the_instance_is_stopped(tmp_path: Path) -> None:
    async with Bench.of(tmp_path) as bench:
        bench.fleet.close()
        with pytest.raises(DriverError, match="being stopped"):
            await bench.driver.start("tiny", A, 1)


async def test_a_worker_whose_settings_are_wrong_ends_an_instance_that_is_not_complete(tmp_path: Path) -> None:
    async with Bench.of(tmp_path, "import os; os._exit(2)") as bench:
        bench.supervisor.has_started = False
        with contextlib.suppress(DriverError):
            await bench.driver.start("tiny", A, 1)
        with pytest.raises(CommandError):
            async with asyncio.timeout(60):
                await bench.supervisor.failure()


def test_without_the_socket_there_is_no_driver() -> None:
    with pytest.raises(ConfigError, match="fleet_fd"):
        ProcessDriver(-1)
    with open(os.devnull) as file, pytest.raises(ConfigError, match="headrace up --autoscale"):
        ProcessDriver(os.dup(file.fileno()))
