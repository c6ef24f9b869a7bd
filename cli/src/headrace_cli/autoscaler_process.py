"""The autoscaler among the supervised processes: each of its lives has a socket to ask for workers."""

import asyncio
import socket
from pathlib import Path

import structlog

from headrace_cli.process import Process, ProcessSpec
from headrace_cli.worker_fleet import Refused, WorkerFleet
from headrace_shared.errors import ProtocolError
from headrace_shared.settings import PREFIX
from headrace_shared.worker_processes import (
    Answer,
    NotDone,
    Question,
    StartWorker,
    StopWorker,
    Workers,
    read_question,
    to_frame,
)

MAX_QUESTIONS = 64
"""Under way at a time; further ones wait in the socket."""

log = structlog.get_logger(__name__)


class AutoscalerProcess(Process):
    def __init__(self, spec: ProcessSpec, log_dir: Path, fleet: WorkerFleet) -> None:
        super().__init__(spec, log_dir)
        self._fleet = fleet
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        self.pass_fds = (theirs.fileno(),)
        self.extra_environ = {PREFIX + "FLEET_FD": str(theirs.fileno())}
        try:
            await super().start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        task = asyncio.create_task(self._serve(ours), name="worker-fleet")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def kill(self) -> None:
        await super().kill()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, connection: socket.socket) -> None:
        """Until the other end is closed. What was asked for by then is done to its end."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        room = asyncio.Semaphore(MAX_QUESTIONS)
        try:
            async with asyncio.TaskGroup() as group:
                while (question := await read_question(reader)) is not None:
                    await room.acquire()
                    task = group.create_task(self._reply(question, writer), name="worker-question")
                    task.add_done_callback(lambda _: room.release())
        except* ProtocolError as error:
            log.warning("the autoscaler is not understood", error=str(error.exceptions[0]))
        finally:
            writer.close()

    async def _reply(self, question: Question, writer: asyncio.StreamWriter) -> None:
        answer = await self._answer(question)
        if not writer.is_closing():
            writer.write(to_frame(answer))

    async def _answer(self, question: Question) -> Answer:
        number = question.number
        try:
            if isinstance(question, StartWorker):
                generation, is_parked = question.generation, question.is_parked
                await self._fleet.start(question.model, question.worker, generation, is_parked=is_parked)
            elif isinstance(question, StopWorker):
                await self._fleet.stop(question.worker, question.grace_s)
        except Refused as error:
            return NotDone(number=number, reason=str(error), is_full=error.is_full, is_fenced=error.is_fenced)
        return Workers(number=number, workers=self._fleet.list())
