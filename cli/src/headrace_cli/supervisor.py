"""Keeps processes alive, and ends them in order."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from headrace_cli.errors import CommandError
from headrace_cli.process import Supervised
from headrace_cli.restarts import MAX_SHORT_LIVES, Restarts
from headrace_shared.settings import EXIT_CONFIG

TRIM_PERIOD_S = 2.0
KILL_MARGIN_S = 7.0
"""On top of the drain time: services cut themselves off some seconds after it."""


class Supervisor:
    """`on_event` is told in one line what happened; `was_ready`: whether a process that has just ended ever was."""

    def __init__(self, was_ready: Callable[[Supervised], bool], on_event: Callable[[str], None]) -> None:
        self.processes: list[Supervised] = []
        self.has_started = False
        """Set once the instance is complete: from then on, one of several equal processes may be given up."""
        self._num_early_ends = 0
        self._was_ready = was_ready
        self._on_event = on_event
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def failure(self) -> None:
        """Waits until the instance cannot go on; raises CommandError."""
        await asyncio.shield(self._failure)

    async def start(self, process: Supervised) -> None:
        """Starts it and keeps it alive until `stop`. Raises CommandError if it cannot be started at all."""
        process.phase = "starting"
        self.processes.append(process)
        await self._start(process)
        task = asyncio.create_task(self._keep(process), name=process.spec.name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def start_once(self, process: Supervised, on_exit: Callable[[int], None]) -> None:
        """Starts it for one life, whose exit code `on_exit` is told. It stays among `processes` until `forget`. Raises
        CommandError if it cannot be started."""
        process.phase = "starting"
        self.processes.append(process)
        await self._start(process)
        task = asyncio.create_task(self._watch(process, on_exit), name=process.spec.name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def forget(self, process: Supervised) -> None:
        if process in self.processes:
            self.processes.remove(process)

    async def trim_logs(self) -> None:
        """Bounds the log files for ever; run it as a task."""
        while True:
            for process in self.processes:
                await asyncio.to_thread(process.trim_log)
            await asyncio.sleep(TRIM_PERIOD_S)

    async def stop(self, order: Sequence[str], drain_timeout_s: float, hurry: asyncio.Event) -> None:
        """Ends all processes, service by service; at once when `hurry` is set. Afterwards none is left."""
        await self._cancel_tasks()
        work = asyncio.create_task(self._stop_in_order(order, drain_timeout_s))
        impatience = asyncio.create_task(hurry.wait())
        try:
            await asyncio.wait((work, impatience), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, impatience):
                task.cancel()
            await asyncio.gather(work, impatience, return_exceptions=True)
            await asyncio.gather(*(process.kill() for process in self.processes), return_exceptions=True)
            for process in self.processes:
                process.phase = "stopped"

    async def _stop_in_order(self, order: Sequence[str], drain_timeout_s: float) -> None:
        for service in order:
            group = [process for process in self.processes if process.spec.service == service]
            for process in group:
                process.phase = "stopping"
            await asyncio.gather(*(process.stop(drain_timeout_s + KILL_MARGIN_S) for process in group))

    async def _keep(self, process: Supervised) -> None:
        restarts = Restarts()
        while True:
            code = await process.wait()
            lifetime_s = time.monotonic() - process.started_at
            reason = process.last_line()
            was_ready = self._was_ready(process)
            delay_s = restarts.delay_after(lifetime_s, was_ready=was_ready, is_complete=self.has_started)
            if delay_s is None or code == EXIT_CONFIG:
                self._give_up(process, code, reason)
                return
            process.phase = "restarting"
            self._on_event(f"{process.spec.name} ended ({describe_exit(code)}); starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            with contextlib.suppress(CommandError):  # counts as one more short life
                await self._start(process)

    async def _watch(self, process: Supervised, on_exit: Callable[[int], None]) -> None:
        code = await process.wait()
        was_asked = process.phase == "stopping"
        on_exit(code)
        process.phase = "ended"
        self._num_early_ends += code != 0 and not was_asked
        is_hopeless = code == EXIT_CONFIG or self._num_early_ends >= MAX_SHORT_LIVES
        if is_hopeless and not self.has_started:
            self._give_up(process, code, process.last_line())
        if code != 0 and not was_asked:
            self._on_event(f"{process.spec.name} ended ({describe_exit(code)})")

    def _give_up(self, process: Supervised, code: int, reason: str) -> None:
        """Raises CommandError unless another process does the same work."""
        process.phase = "failed"
        prefix = f"headrace-{process.spec.service}: "
        if code == EXIT_CONFIG and reason:
            error = CommandError(reason.removeprefix(prefix))
        else:
            last = f": {reason[:300]}" if reason else ""
            problem = f"{process.spec.name} keeps failing ({describe_exit(code)}){last}"
            error = CommandError(problem, f"its log is {process.log_path}")
        peers = [
            other for other in self.processes if other.spec.service == process.spec.service and other is not process
        ]
        if not self.has_started or not any(other.is_alive for other in peers):
            raise error
        self._on_event(f"{error}; going on without it")

    async def _start(self, process: Supervised) -> None:
        try:
            await process.start()
        except OSError as error:
            raise CommandError(f"cannot start {process.spec.name}: {error.strerror or error}") from error

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # whoever waits is told; nobody need wait

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
