"""The workers of an instance that scales itself: processes that an autoscaler has us start and stop.

Each has one life; whether another one follows is the autoscaler's business. They are our children, so that they outlive
the autoscaler and nothing outlives us.
"""

import asyncio
import time
from pathlib import Path

from headrace_cli.errors import CommandError
from headrace_cli.plan import Plan
from headrace_cli.process import Process, ProcessSpec
from headrace_cli.supervisor import Supervisor
from headrace_shared.messages import WorkerId
from headrace_shared.worker_processes import WorkerProcess


class Refused(Exception):
    """Why a worker is not started."""

    def __init__(self, reason: str, *, is_full: bool = False, is_fenced: bool = False) -> None:
        super().__init__(reason)
        self.is_full = is_full
        self.is_fenced = is_fenced


class ManagedWorker(Process):
    """One life of a worker, under a name that was chosen for it."""

    def __init__(self, spec: ProcessSpec, log_dir: Path, worker: WorkerId, place: int) -> None:
        super().__init__(spec, log_dir)
        self.id = worker
        self.place = place
        self.began_at = time.time()
        self.exit_code: int | None = None
        self.lock = asyncio.Lock()
        """Held while it is started, so that nobody stops what is not there yet."""

    def new_id(self) -> str:
        return self.id


class WorkerFleet:
    def __init__(self, supervisor: Supervisor, plan: Plan, log_dir: Path) -> None:
        self._supervisor = supervisor
        self._plan = plan
        self._log_dir = log_dir
        self._workers: dict[WorkerId, ManagedWorker] = {}
        self._generation = 0
        self._is_closed = False

    @property
    def max_workers(self) -> int:
        return len(self._plan.places)

    def list(self) -> tuple[WorkerProcess, ...]:
        return tuple(
            WorkerProcess(
                worker=worker,
                model=process.spec.model,
                pid=process.pid,
                started_at=process.began_at,
                exit_code=process.exit_code,
                is_stopping=process.phase == "stopping",
            )
            for worker, process in self._workers.items()
        )

    def close(self) -> None:
        """Starts nothing any more."""
        self._is_closed = True

    async def start(self, model: str, worker: WorkerId, generation: int, *, is_parked: bool = False) -> None:
        """No error if it is there. Raises Refused."""
        self._check(model, generation)
        if worker in self._workers:
            return
        taken = {process.place for process in self._workers.values() if process.exit_code is None}
        free = set(range(1, len(self._plan.places) + 1)) - taken
        if not free:
            raise Refused(f"{len(taken)} workers run, as many as may", is_full=True)
        place = min(free)
        spec = self._plan.worker(model, place, is_parked=is_parked)
        process = ManagedWorker(spec, self._log_dir, worker, place)
        # Known before the first await: the same question may come twice.
        self._workers[worker] = process

        def on_exit(code: int) -> None:
            process.exit_code = code

        try:
            async with process.lock:
                await self._supervisor.start_once(process, on_exit)
        except CommandError as error:
            self._forget(worker)
            raise Refused(str(error)) from error

    async def stop(self, worker: WorkerId, grace_s: float) -> None:
        """SIGTERM, SIGKILL after `grace_s`, and nothing is left of it. No error if it is not there."""
        process = self._workers.get(worker)
        if process is None:
            return
        async with process.lock:
            if process.exit_code is None:
                process.phase = "stopping"
            await process.stop(grace_s)
        self._forget(worker)

    def _check(self, model: str, generation: int) -> None:
        if self._is_closed:
            raise Refused("the instance is being stopped")
        if generation < self._generation:
            reason = f"generation {generation} is out of date, {self._generation} was here"
            raise Refused(reason, is_fenced=True)
        self._generation = generation
        if model not in self._plan.models:
            raise Refused(f"this instance serves {', '.join(sorted(self._plan.models))}, not {model}")

    def _forget(self, worker: WorkerId) -> None:
        process = self._workers.pop(worker, None)
        if process is not None:
            self._supervisor.forget(process)
