"""An engine whose workers speak on a bus and obey: a driver for tests of the shell. Nothing computes."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from headrace_autoscaler.driver import DriverError, Instance, InstanceState
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import CommandKind, Hello, Telemetry, WorkerCommand, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.subjects import commands_subject, hello_subject, telemetry_subject
from headrace_shared.tasks import end

HELLO_S = 0.1


class TalkingEngine:
    """Shared by several autoscalers, as a machine is. `starts` has who asked, by generation."""

    def __init__(self, bus: Bus, *, load_s: float = 0.2, start_s: float = 0.0, capacity: int = 8) -> None:
        self._bus = bus
        self._load_s = load_s
        self._start_s = start_s
        self._capacity = capacity
        self.workers: dict[WorkerId, TalkingWorker] = {}
        self.starts: list[tuple[int, WorkerId]] = []
        self.generation = 0
        self.problem = ""
        """Why no call succeeds."""

    @property
    def num_ready(self) -> int:
        return sum(each.state is WorkerState.READY and each.exit_code is None for each in self.workers.values())

    async def instances(self) -> Sequence[Instance]:
        self._check()
        return [each.instance() for each in self.workers.values()]

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        self._check()
        assert generation >= self.generation, "a fenced autoscaler acts"
        self.generation = generation
        self.starts.append((generation, worker))
        if worker not in self.workers:
            self.workers[worker] = TalkingWorker(self._bus, model, worker, self._capacity)
            await asyncio.sleep(self._start_s)
        await self.workers[worker].run(self._load_s, parked=parked)
        return self.workers[worker].instance()

    async def stop(self, instance: Instance, grace_s: float) -> None:
        self._check()
        worker = self.workers.pop(instance.worker, None)
        if worker is not None:
            await worker.kill()

    async def close(self) -> None:
        for worker in list(self.workers.values()):
            await worker.kill()

    def _check(self) -> None:
        if self.problem:
            raise DriverError(self.problem)


class TalkingWorker:
    def __init__(self, bus: Bus, model: str, worker: WorkerId, capacity: int) -> None:
        self._bus = bus
        self._model = model
        self._worker = worker
        self._capacity = capacity
        self.state: WorkerState | None = None
        self.exit_code: int | None = None
        self.num_running = 0
        self.command_epoch = 0
        self.commands: list[WorkerCommand] = []
        self._task: asyncio.Task[None] | None = None

    def instance(self) -> Instance:
        created = InstanceState.CREATED if self._task is None else InstanceState.RUNNING
        state = created if self.exit_code is None else InstanceState.EXITED
        return Instance(self._worker, self._worker, self._model, state, time.time(), self.exit_code, True)

    async def run(self, load_s: float, *, parked: bool) -> None:
        if self._task is None:
            await self._bus.subscribe(commands_subject(self._worker), self._on_command)
            self._task = asyncio.create_task(self._live(load_s, parked), name=self._worker)

    async def kill(self, code: int = -9) -> None:
        self.exit_code = code
        if self._task is not None:
            await end(self._task)

    async def _live(self, load_s: float, parked: bool) -> None:
        self.state = WorkerState.LOADING
        loaded_at = time.monotonic() + load_s
        while self.exit_code is None:
            if self.state is WorkerState.LOADING and time.monotonic() >= loaded_at:
                self.state = WorkerState.PARKED if parked else WorkerState.READY
            elif self.state is WorkerState.DRAINING and not self.num_running:
                self.state = WorkerState.LEAVING
            self._say()
            if self.state is WorkerState.LEAVING:
                self.exit_code = 0
            await asyncio.sleep(HELLO_S)

    def _say(self) -> None:
        assert self.state is not None
        hello = Hello(
            worker=self._worker,
            model=self._model,
            state=self.state,
            epoch=1,
            num_blocks=64,
            block_size=16,
            context=1024,
            max_sequences=self._capacity,
            tokens_per_iteration=64,
            command_epoch=self.command_epoch,
        )
        with contextlib.suppress(BusError):
            self._bus.publish(hello_subject(self._model, self._worker), encode(hello))
        gauges = {"num_running": float(self.num_running)}
        figures = Telemetry(service="worker", id=self._worker, state=self.state.value, model=self._model, gauges=gauges)
        with contextlib.suppress(BusError):
            self._bus.publish(telemetry_subject("worker", self._worker), encode(figures))

    def _on_command(self, message: Message) -> None:
        command = decode(message.data, WorkerCommand)
        if command.epoch < self.command_epoch:
            return
        self.command_epoch = command.epoch
        self.commands.append(command)
        if command.kind is CommandKind.DRAIN:
            self.state = WorkerState.DRAINING
        elif command.kind is CommandKind.PARK:
            self.state = WorkerState.PARKED
        else:
            self.state = WorkerState.READY
