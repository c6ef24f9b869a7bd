"""One batch, from where its record stands to its end, by the holder of its lease.

Everything that has happened is in the broker: the record says how far the batch is, the journal which lines have a
result. So whoever takes over, at any moment, goes on; what was under way is found again under its idempotency key. All
changes of the record are fenced by the epoch of the lease.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

import structlog

from headrace_router.batches.execution import BatchLine, LineExecutor, LineFailed, result_of_failure
from headrace_router.batches.journal import Journal
from headrace_router.batches.lines import Line, LineChecker, LineSplitter, parse_line
from headrace_router.batches.output import Written, write_files
from headrace_router.batches.record import (
    MAX_ERRORS,
    BatchError,
    BatchRecord,
    BatchState,
    broken,
    checked,
    counted,
    ended,
    finalized,
    named,
    rejected,
)
from headrace_router.batches.results import LineResult
from headrace_router.batches.store import BatchStore, Superseded
from headrace_router.batches.verdict import judge
from headrace_router.files.library import FileLibrary, new_file_id
from headrace_router.identity import Identity
from headrace_router.owners import owner_token
from headrace_shared.errors import BusError, InvalidRequest, ProtocolError, RequestError, ServiceFailure
from headrace_shared.objects import ObjectDamaged
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

REPORT_S = 1.0
"""Between two writes of the counts."""
START_GAP_S = 0.005
"""Between the beginnings of two lines: a burst of them would hold up whoever waits at this router."""
ROOM_S = 0.5
"""Between two looks whether the caller's limits leave room."""
LINES_AT_ONCE = 512
"""Parsed without a break for others."""


class RunSettings(NamedTuple):
    max_lines: int
    concurrency: int
    """Lines at once."""
    max_result_bytes: int
    """Of a batch, packed. All batches share the journal: what is beyond is not run."""


class Parts(NamedTuple):
    """What a run needs."""

    store: BatchStore
    journal: Journal
    library: FileLibrary
    executor: LineExecutor
    identify: Callable[[BatchRecord], Identity]
    """As whom the lines run now. Raises RequestError, which becomes their result."""
    has_room: Callable[[Identity], bool]
    """Its limits leave enough for who cannot wait."""
    settings: RunSettings
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""


_NO_ROOM = InvalidRequest("The results of this batch are too large.", code="batch_results_too_large")


class InputLost(Exception):
    """Of an input that was there when the batch was made."""


class BatchRun:
    def __init__(self, record: BatchRecord, parts: Parts) -> None:
        """`record`: just taken; its epoch is ours."""
        self._record = record
        self._epoch = record.epoch
        self._parts = parts
        self._stop = asyncio.Event()
        """No more lines are wanted: the batch is cancelled, or its time is up."""
        self._is_late = parts.clock() >= record.expires_at
        self._running: dict[int, tuple[Identity, BatchLine]] = {}
        """Calls that are being answered, by line."""
        self._num_good = 0
        self._num_failed = 0
        self._num_bytes = 0
        """Of results in the journal."""

    def on_change(self, record: BatchRecord) -> None:
        """Somebody has changed it."""
        if record.state is BatchState.CANCELLING:
            self._stop.set()

    async def run(self) -> None:
        """Returns when the batch is over. Raises Superseded, BusError."""
        try:
            if self._record.state is BatchState.VALIDATING and not self._is_late:
                await self._check()
            if self._record.state is BatchState.IN_PROGRESS and not self._is_late:
                await self._run_lines()
            if not self._record.is_over:
                await self._finalize()
        except InputLost as lost:
            await self._end_without_input(BatchError(code="input_file_lost", message=str(lost)))
        except Superseded:
            kept = await self._parts.store.get(self._record.owner, self._record.batch_id)
            if kept is None or kept.record.is_over:
                # What we have added since then is nobody's.
                await self._parts.journal.purge(self._record.batch_id)
            raise
        await self._parts.journal.purge(self._record.batch_id)
        log.info("batch is over", batch_id=self._record.batch_id, state=self._record.state)

    async def _change(self, change: Callable[[BatchRecord], BatchRecord]) -> None:
        self._record = await self._parts.store.change(self._record, change, self._epoch)

    async def _advance(self, change: Callable[[BatchRecord], BatchRecord]) -> None:
        """Unless somebody has cancelled the batch meanwhile."""
        await self._change(lambda record: record if record.state is BatchState.CANCELLING else change(record))

    async def _check(self) -> None:
        record, settings = self._record, self._parts.settings
        checker = LineChecker(record.endpoint, settings.max_lines, MAX_ERRORS)
        async with aclosing(self._input()) as pieces:
            async for piece in pieces:
                checker.feed(piece)
                await asyncio.sleep(0)
                if checker.has_seen_enough or self._stop.is_set():
                    break
            else:
                checker.end()
        now = self._parts.clock()
        if checker.errors:
            await self._advance(lambda record: rejected(record, tuple(checker.errors), now))
        else:
            await self._advance(lambda record: checked(record, checker.num_lines, now))

    # Lines.

    async def _run_lines(self) -> None:
        """Until all are done, the batch is cancelled, or its time is up."""
        done = await self._parts.journal.done(self._record.batch_id)
        self._num_good, self._num_failed, self._num_bytes = done.num_good, done.num_failed, done.num_bytes
        reporter = asyncio.create_task(self._report(), name="batch-report")
        left_s = max(0.0, self._record.expires_at - self._parts.clock())
        alarm = asyncio.get_running_loop().call_later(left_s, self._end_window)
        try:
            await self._run_all(done.numbers)
        finally:
            alarm.cancel()
            await end(reporter)
        await self._change(lambda record: counted(record, self._num_good, self._num_failed))

    def _end_window(self) -> None:
        self._is_late = True
        self._stop.set()

    async def _run_all(self, done: set[int]) -> None:
        tasks: set[asyncio.Task[Any]] = set()
        stopping = asyncio.create_task(self._stop.wait(), name="batch-stop")
        try:
            async with aclosing(self._lines(done)) as lines:
                async for line in lines:
                    while len(tasks) >= self._concurrency() and not stopping.done():
                        await self._settle(tasks, stopping)
                    if stopping.done():
                        return
                    tasks.add(asyncio.create_task(self._run_line(line), name="batch-line"))
                    await asyncio.sleep(START_GAP_S)
            while tasks and not stopping.done():
                await self._settle(tasks, stopping)
        finally:
            stopping.cancel()
            if self._stop.is_set():
                # Held calls go on for a while without their client. That is right only where another router takes over.
                for identity, batch_line in self._running.values():
                    self._parts.executor.abort(identity, batch_line)
            for task in tasks:
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    async def _settle(self, tasks: set[asyncio.Task[Any]], stopping: asyncio.Task[Any]) -> None:
        """Until one of the lines is done, or none is wanted any more. Raises what a line has raised."""
        finished, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in finished & tasks:
            tasks.discard(task)
            task.result()

    def _concurrency(self) -> int:
        """A key that may have only some calls at once keeps half of them for whoever waits for an answer."""
        most = self._parts.settings.concurrency
        try:
            key = self._parts.identify(self._record).key
        except RequestError:
            return most
        return min(most, max(1, key.max_concurrent // 2)) if key is not None and key.max_concurrent else most

    async def _run_line(self, line: Line) -> None:
        batch_line, result = await self._result(line)
        try:
            num_bytes = await self._parts.journal.add(self._record.batch_id, result)
        except ProtocolError:
            error = ServiceFailure("The answer is too large for a batch.", code="answer_too_large")
            result = result_of_failure(line, error)
            num_bytes = await self._parts.journal.add(self._record.batch_id, result)
        self._num_bytes += num_bytes
        await self._parts.executor.done(self._record.owner, batch_line, result)
        if result.is_good:
            self._num_good += 1
        else:
            self._num_failed += 1

    async def _result(self, line: Line) -> tuple[BatchLine, LineResult]:
        """Tries as often as it makes sense. Cancelled where the batch stops."""
        num_failures = attempt = 0
        while True:
            batch_line = BatchLine(self._record.batch_id, line, attempt)
            if self._num_bytes > self._parts.settings.max_result_bytes:
                return batch_line, result_of_failure(line, _NO_ROOM)
            try:
                identity = self._parts.identify(self._record)
            except RequestError as error:
                return batch_line, result_of_failure(line, error)
            if not self._parts.has_room(identity):
                await asyncio.sleep(ROOM_S)
                continue
            self._running[line.number] = (identity, batch_line)
            try:
                return batch_line, await self._parts.executor.run(self._record.endpoint, identity, batch_line)
            except LineFailed as failed:
                verdict = judge(failed.error, num_failures, attempt, had_begun=failed.had_begun)
                if verdict is None:
                    return batch_line, result_of_failure(line, failed.error)
                num_failures += verdict.is_failure
                attempt += verdict.is_new
            finally:
                self._running.pop(line.number, None)
            await asyncio.sleep(verdict.after_s)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            good, failed = self._num_good, self._num_failed
            if good + failed > self._record.completed + self._record.failed:
                try:
                    await self._change(partial(counted, completed=good, failed=failed))
                except BusError as error:
                    log.info("counts not written yet", batch_id=self._record.batch_id, error=str(error))
                self.on_change(self._record)

    # Input.

    async def _input(self) -> AsyncGenerator[bytes, None]:
        """Raises InputLost."""
        owner = owner_token(self._record.owner)
        try:
            stored = await self._parts.library.stored(owner, self._record.input_file_id, is_in_use=True)
            async with aclosing(self._parts.library.content(stored)) as pieces:
                async for piece in pieces:
                    yield piece
        except (InvalidRequest, ObjectDamaged, ProtocolError) as error:
            raise InputLost(f"The input file cannot be read: {error}") from error

    async def _lines(self, done: set[int]) -> AsyncGenerator[Line, None]:
        """All but those that are done; the input has been checked."""
        splitter, num_seen = LineSplitter(), 0
        async with aclosing(self._input()) as pieces:
            async for piece in pieces:
                for number, text in splitter.feed(piece):
                    num_seen += 1
                    if num_seen % LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                    if number not in done:
                        yield parse_line(number, text, self._record.endpoint)
        for number, text in splitter.end():
            if number not in done:
                yield parse_line(number, text, self._record.endpoint)

    # End.

    async def _finalize(self) -> None:
        parts, record = self._parts, self._record
        if not record.in_progress_at:
            await self._change(lambda record: self._without_files(record))
            return
        ids = await self._new_files()
        await self._change(lambda record: finalized(record, *ids, parts.clock(), is_late=self._is_late))
        record = self._record
        # A broker of a cluster may not know the last results yet; and results must not be missed for ever.
        may_be_short = record.state is BatchState.CANCELLING or record.is_late or parts.clock() >= record.expires_at
        written = await write_files(record, parts.journal, parts.library, self._lines, may_be_short=may_be_short)
        await self._end_with(written, ended)

    async def _end_without_input(self, error: BatchError) -> None:
        """What has been paid for is not lost with it."""
        parts = self._parts
        if not self._record.in_progress_at:
            await self._change(lambda record: rejected(record, (error,), parts.clock()))
            return
        ids = await self._new_files()
        await self._change(lambda record: named(record, *ids))
        written = await write_files(self._record, parts.journal, parts.library, None, may_be_short=True)
        await self._end_with(
            written, lambda record, good, failed, files, now: broken(record, error, good, failed, files, now)
        )

    async def _new_files(self) -> tuple[str, str]:
        """Ids. First goes what somebody who did not come to the end has written: nobody knows it by another name."""
        for file_id in (self._record.output_file_id, self._record.error_file_id):
            if file_id:
                await self._parts.library.discard(owner_token(self._record.owner), file_id)
        return new_file_id(), new_file_id()

    async def _end_with(
        self, written: Written, change: Callable[[BatchRecord, int, int, tuple[str, str], float], BatchRecord]
    ) -> None:
        """The files that the record names are written."""
        record, now = self._record, self._parts.clock()
        files = (
            record.output_file_id if written.num_good else "",
            record.error_file_id if written.num_failed else "",
        )
        try:
            await self._change(lambda record: change(record, written.num_good, written.num_failed, files, now))
        except Superseded:
            for file_id in files:
                if file_id:
                    await self._parts.library.discard(owner_token(record.owner), file_id)
            raise

    def _without_files(self, record: BatchRecord) -> BatchRecord:
        now = self._parts.clock()
        if record.state is BatchState.VALIDATING:
            record = finalized(record, "", "", now, is_late=True)
        return ended(record, 0, 0, ("", ""), now)
