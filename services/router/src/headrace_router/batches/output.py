"""Writes a batch's output and error files from the journal, and names each line in exactly one of them once."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from headrace_router.batches.journal import Journal
from headrace_router.batches.lines import Line
from headrace_router.batches.record import BatchRecord, BatchState
from headrace_router.batches.results import output_line, unfinished
from headrace_router.files.library import OUTPUT_PURPOSE, Draft, FileLibrary
from headrace_router.owners import owner_token
from headrace_shared.errors import BusUnavailable

WRITE_TIMEOUT_S = 3600.0
"""What is not complete then is deleted as left behind."""


class Written(NamedTuple):
    num_good: int
    num_failed: int


async def write_files(
    record: BatchRecord,
    journal: Journal,
    library: FileLibrary,
    lines: Callable[[set[int]], AsyncGenerator[Line, None]] | None,
    *,
    may_be_short: bool,
) -> Written:
    """Under the ids that the record names; a file without lines is not kept. `lines(done)`: of the input, all others;
    None: nobody knows them any more. `may_be_short`: there may be lines without a result. Raises BusError; then nothing
    is left."""
    drafts: list[Draft] = []
    try:
        for file_id, kind in ((record.output_file_id, "output"), (record.error_file_id, "error")):
            name = f"{record.batch_id}_{kind}.jsonl"
            drafts.append(await library.begin_output(owner_token(record.owner), file_id, name, WRITE_TIMEOUT_S))
        counts = await _fill(record, journal, lines, *drafts, may_be_short=may_be_short)
        for draft, num_lines in zip(list(drafts), counts, strict=True):
            if num_lines:
                await library.finish(draft, OUTPUT_PURPOSE, record.output_life_s)
                drafts.remove(draft)
        return counts
    finally:
        for draft in drafts:
            await library.abandon(draft)


async def _fill(
    record: BatchRecord,
    journal: Journal,
    lines: Callable[[set[int]], AsyncGenerator[Line, None]] | None,
    output: Draft,
    errors: Draft,
    *,
    may_be_short: bool,
) -> Written:
    num_good = num_failed = 0
    done: set[int] = set()
    async with aclosing(journal.results(record.batch_id)) as results:
        async for result in results:
            done.add(result.number)
            num_good += result.is_good
            num_failed += not result.is_good
            await (output if result.is_good else errors).writer.write(output_line(record.batch_id, result))
    if len(done) < record.total:
        if not may_be_short:
            raise BusUnavailable(f"{record.batch_id}: {len(done)} of {record.total} results are there")
        if lines is None:
            return Written(num_good, num_failed)
        was_cancelled = record.state is BatchState.CANCELLING
        async with aclosing(lines(done)) as rest:
            async for line in rest:
                num_failed += 1
                result = unfinished(line.number, line.custom_id, was_cancelled=was_cancelled)
                await errors.writer.write(output_line(record.batch_id, result))
    return Written(num_good, num_failed)
