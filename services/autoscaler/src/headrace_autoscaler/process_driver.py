"""Workers as processes of this machine, run by the `headrace up` that started us, over an inherited socket.

They are its children, not ours: they go on when the autoscaler dies, and the next one finds them there.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence

from headrace_autoscaler.driver import DriverError, Fenced, Instance, InstanceState, NoCapacity
from headrace_shared.errors import ConfigError, ProtocolError
from headrace_shared.messages import WorkerId
from headrace_shared.tasks import end
from headrace_shared.worker_processes import (
    Answer,
    ListWorkers,
    NotDone,
    Question,
    StartWorker,
    StopWorker,
    WorkerProcess,
    Workers,
    read_answer,
    to_frame,
)

ANSWER_S = 15.0
"""On top of the grace of a stop."""


class ProcessDriver:
    def __init__(self, fd: int) -> None:
        """Owns the socket. Raises ConfigError if `fd` is none."""
        try:
            self._socket = socket.socket(fileno=fd)
            self._socket.getpeername()
        except (OSError, ValueError) as error:
            raise ConfigError("fleet_fd", "processes are run by `headrace up --autoscale` only") from error
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self._opening = asyncio.Lock()

    async def instances(self) -> Sequence[Instance]:
        return [_instance(each) for each in await self._ask(lambda number: ListWorkers(number=number), ANSWER_S)]

    async def start(self, model: str, worker: WorkerId, generation: int, parked: bool = False) -> Instance:
        def question(number: int) -> Question:
            return StartWorker(number=number, model=model, worker=worker, generation=generation, is_parked=parked)

        for each in await self._ask(question, ANSWER_S):
            if each.worker == worker:
                return _instance(each)
        raise DriverError(f"{worker} was started and has ended")

    async def stop(self, instance: Instance, grace_s: float) -> None:
        def question(number: int) -> Question:
            return StopWorker(number=number, worker=instance.worker, grace_s=grace_s)

        if not instance.is_managed:
            raise DriverError(f"{instance.worker} was not started by an autoscaler")
        await self._ask(question, grace_s + ANSWER_S)

    async def close(self) -> None:
        if self._reading is not None:
            await end(self._reading)
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()

    async def _ask(self, question: Callable[[int], Question], timeout_s: float) -> tuple[WorkerProcess, ...]:
        writer = await self._open()
        self._number += 1
        number = self._number
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(to_frame(question(number)))
                await writer.drain()
                told = await answer
        except (TimeoutError, OSError) as error:
            raise DriverError(f"`headrace up` does not answer: {error or 'no answer in time'}") from error
        finally:
            self._waiting.pop(number, None)
        if isinstance(told, Workers):
            return told.workers
        if told.is_full:
            raise NoCapacity(told.reason)
        raise Fenced(told.reason) if told.is_fenced else DriverError(told.reason)

    async def _open(self) -> asyncio.StreamWriter:
        async with self._opening:
            if self._writer is None:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
                except (OSError, ValueError) as error:
                    raise DriverError(f"no way to `headrace up`: {error}") from error
                self._reading = asyncio.create_task(self._read(reader), name="worker-processes")
            if self._reading is None or self._reading.done():
                raise DriverError("`headrace up` has closed the connection")
            return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        reason = "`headrace up` has closed the connection"
        try:
            while (answer := await read_answer(reader)) is not None:
                future = self._waiting.get(answer.number)
                if future is not None and not future.done():
                    future.set_result(answer)
        except ProtocolError as error:
            reason = f"`headrace up` is not understood: {error}"
        finally:
            for number, future in self._waiting.items():
                if not future.done():
                    future.set_result(NotDone(number=number, reason=reason))


def _instance(process: WorkerProcess) -> Instance:
    state = InstanceState.STOPPING if process.is_stopping else InstanceState.RUNNING
    return Instance(
        key=process.worker,
        worker=process.worker,
        model=process.model,
        state=state if process.exit_code is None else InstanceState.EXITED,
        started_at=process.started_at,
        exit_code=process.exit_code,
        is_managed=True,
    )
