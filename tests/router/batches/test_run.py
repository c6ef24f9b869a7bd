"""A batch that is interrupted at any moment, and worked on by two at once, still names every line once."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import ClassVar

import msgspec
import pytest

from headrace_router.batches.record import BatchRecord, BatchState, cancelled
from headrace_router.batches.results import LineResult
from headrace_router.batches.run import RunSettings
from headrace_router.batches.store import Superseded
from headrace_router.bodies import Body
from headrace_router.call import Call
from headrace_router.files.library import FileLibrary
from headrace_router.owners import owner_token
from headrace_shared.bus import Message
from headrace_shared.codec import encode
from headrace_shared.errors import BusError, BusUnavailable, InvalidRequest, QueueFull
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.subjects import BATCH_RESULTS, FILES
from tests.router.batches.world import OWNER, World


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_WAIT_S", "MAX_WAIT_S"):
        monkeypatch.setattr(f"headrace_router.batches.verdict.{name}", 0.001)
    monkeypatch.setattr("headrace_router.batches.run.REPORT_S", 0.01)
    monkeypatch.setattr("headrace_router.batches.run.START_GAP_S", 0.0)
    monkeypatch.setattr("headrace_router.batches.journal.FULL_WAIT_S", 0.01)


async def run_in_part(world: World, record: BatchRecord) -> int:
    """A run that ends when it has asked for some fifty lines; the number of those that are done."""
    run = asyncio.create_task((await world.take(record)).run())
    while sum(world.answered.values()) < 50:  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    return len((await world.journal.done(record.batch_id)).numbers)


@pytest.mark.parametrize("seed", range(6))
async def test_interruptions_at_any_moment(seed: int, quick: None) -> None:
    world = await World(seed).open()
    world.trouble = 0.1
    record = await world.batch(100, num_bad=7)
    zombies: list[asyncio.Task[None]] = []
    num_lives = 0
    while not (await world.record()).is_over:
        num_lives += 1
        task = asyncio.create_task((await world.take(record)).run())
        await asyncio.wait([task], timeout=world.chance.uniform(0.0, 0.04 * num_lives))
        if world.chance.random() < 0.3:
            zombies.append(task)  # frozen, say: it goes on beside the next one
            continue
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    ends = await asyncio.gather(*zombies, return_exceptions=True)
    assert all(end is None or isinstance(end, Superseded | BusError | asyncio.CancelledError) for end in ends), ends
    over = await world.record()
    assert over.state is BatchState.COMPLETED and num_lives > 1
    output, errors = await world.lines(over.output_file_id), await world.lines(over.error_file_id)
    ids = Counter(line["custom_id"] for line in output + errors)
    assert ids == Counter(f"c{number}" for number in range(100))
    assert (over.total, over.completed, over.failed) == (100, len(output), len(errors))
    assert {f"c{number}" for number in range(7)} <= {line["custom_id"] for line in errors}
    for line in output:
        number = str(line["custom_id"]).removeprefix("c")
        assert line["response"]["body"] == {"text": f"p{number}"}  # type: ignore[index]  # of a good line
    # Whatever took turns: the same line has the same key, so that the queue has it once.
    assert len(world.keys) == 100
    assert await world.bus.num_messages(BATCH_RESULTS.name) == 0
    kept = {file.file_id for file in await world.library.all_of(owner_token(OWNER))}
    assert kept == {record.input_file_id, over.output_file_id, over.error_file_id}
    world.now += 2 * 86_400
    await world.library.sweep(())
    assert len(await world.bus.entries(FILES.name)) == 0


async def test_a_successor_does_not_run_what_is_done(quick: None) -> None:
    world = await World().open()
    record = await world.batch(200)
    num_done = await run_in_part(world, record)
    assert num_done > 30
    before = sum(world.answered.values())
    await (await world.take(record)).run()
    assert sum(world.answered.values()) == before + 200 - num_done
    assert (await world.record()).completed == 200


async def test_a_former_owner_changes_nothing(quick: None) -> None:
    world = await World().open()
    record = await world.batch(20)
    former = await world.take(record)
    await (await world.take(record)).run()
    over = await world.record()
    with pytest.raises(Superseded):
        await former.run()
    assert await world.record() == over
    assert len(await world.lines(over.output_file_id)) == 20


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.02])
async def test_cancelled_at_any_moment(moment: float, quick: None) -> None:
    class Stuck(World):
        """The first line has no answer yet, whenever it is."""

        async def answer(self, call: Call, given: Body) -> None:
            if json.loads(given.data)["prompt"] == "p0":
                await asyncio.Event().wait()
            await super().answer(call, given)

    world = await Stuck().open()
    record = await world.batch(100)
    run = await world.take(record)
    task = asyncio.create_task(run.run())
    await asyncio.sleep(moment)
    run.on_change(await world.store.change(record, lambda now: cancelled(now, world.now)))
    await task
    over = await world.record()
    assert over.state is BatchState.CANCELLED
    named = [*await world.lines(over.output_file_id), *await world.lines(over.error_file_id)]
    assert len({line["custom_id"] for line in named}) == len(named) == over.total
    if over.total:
        assert over.completed == len(await world.lines(over.output_file_id))
    if 0 < over.completed < over.total:  # it was not cancelled while its lines were read
        assert len(world.aborted) > 0


async def test_a_key_is_used_again_only_when_its_answer_is_lost() -> None:
    class Lost(World):
        async def answer(self, call: Call, given: Body) -> None:
            key = call.headers["Idempotency-Key"]
            if key.endswith("/0"):
                self.keys.add(key)
                raise InvalidRequest("", code="answer_expired")
            await super().answer(call, given)

    world = await Lost().open()
    await (await world.take(await world.batch(3))).run()
    assert world.keys == {f"batch_1/{line}/{attempt}" for line in (1, 2, 3) for attempt in (0, 1)}
    assert world.forgotten == {f"batch_1/{line}/1" for line in (1, 2, 3)}
    assert (await world.record()).completed == 3


async def test_results_wait_for_room(quick: None) -> None:
    class Full(MemoryBus):
        num_refused = 0

        async def enqueue(self, subject: str, data: bytes, *, message_id: str, headers: object = None) -> int:
            if subject.startswith("batchresults.") and self.num_refused < 20:
                self.num_refused += 1
                raise QueueFull("full")
            return await super().enqueue(subject, data, message_id=message_id)

    world = await World(bus=Full()).open()
    await (await world.take(await world.batch(10))).run()
    assert (await world.record()).completed == 10 and sum(world.answered.values()) == 10


async def test_an_input_that_is_lost_fails_the_batch(quick: None) -> None:
    world = await World().open()
    record = await world.batch(10)
    await world.library.discard(owner_token(OWNER), record.input_file_id)
    await (await world.take(record)).run()
    over = await world.record()
    assert over.state is BatchState.FAILED and over.errors[0].code == "input_file_lost"


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_results_outlive_the_input(is_deleted: bool, quick: None) -> None:
    world = await World().open()
    record = await world.batch(200)
    num_done = await run_in_part(world, record)
    world.now += 8_000 if not is_deleted else 0
    owner = owner_token(OWNER)
    (file,) = await world.library.all_of(owner)
    entry = await world.bus.get(FILES.name, f"{owner}.{file.file_id}")
    assert entry is not None
    expired = msgspec.structs.replace(file, expires_at=int(world.now) - 1)
    await world.bus.put(FILES.name, f"{owner}.{file.file_id}", encode(expired))
    await world.library.sweep(() if is_deleted else {file.file_id})
    assert await world.library.all_of(owner) == []
    await (await world.take(record)).run()
    over = await world.record()
    output = await world.lines(over.output_file_id)
    assert over.state is (BatchState.FAILED if is_deleted else BatchState.COMPLETED)
    assert over.completed == len(output) == (num_done if is_deleted else 200)
    assert over.error_file_id == "" and [error.code for error in over.errors] == ["input_file_lost"] * is_deleted
    assert await world.bus.num_messages(BATCH_RESULTS.name) == 0
    assert {file.file_id for file in await world.library.all_of(owner)} == {over.output_file_id}


async def test_what_a_dead_router_has_written_is_gone_before_it_has_no_name(quick: None) -> None:
    class Dying(FileLibrary):
        async def discard(self, owner: str, file_id: str) -> None:
            raise BusUnavailable("died here")

    world = await World().open()
    record = await world.batch(5)
    await (await world.take(record)).run()
    over = await world.record()
    # As if its end had not been written down.
    await world.store.change(over, lambda now: msgspec.structs.replace(now, state=BatchState.FINALIZING))
    kept = world.parts
    world.parts = kept._replace(library=Dying(world.bus, world.library.limits, lambda: world.now))
    with pytest.raises(BusUnavailable):
        await (await world.take(record)).run()
    assert (await world.record()).output_file_id == over.output_file_id
    world.parts = kept
    for line in range(1, 6):
        await world.journal.add("batch_1", LineResult(number=line, custom_id=f"c{line}", status=200, body=b"{}"))
    await (await world.take(record)).run()
    files = {file.file_id for file in await world.library.all_of(owner_token(OWNER))}
    assert files == {record.input_file_id, (await world.record()).output_file_id}


async def test_the_journal_gives_each_line_once() -> None:
    world = await World().open()
    for number in (1, 2, 1, 3, 2):
        result = LineResult(number=number, custom_id=str(number), status=200 if number < 3 else 500)
        await world.journal.add("batch_1", result)
        await world.journal.add("batch_2", result)
    assert (await world.journal.done("batch_1"))[:2] == ({1, 2, 3}, 2)

    async def numbers(results: AsyncIterator[LineResult]) -> list[int]:
        return [result.number async for result in results]

    assert await numbers(world.journal.results("batch_1")) == [1, 2, 3]
    await world.journal.purge("batch_1")
    assert await numbers(world.journal.results("batch_1")) == []
    assert await numbers(world.journal.results("batch_2")) == [1, 2, 3]


async def test_a_batch_takes_no_more_than_its_share_of_the_journal(quick: None) -> None:
    world = await World().open()
    world.parts = world.parts._replace(settings=RunSettings(max_lines=1000, concurrency=1, max_result_bytes=500))
    await (await world.take(await world.batch(30))).run()
    over = await world.record()
    errors = await world.lines(over.error_file_id)
    assert 2 <= over.completed < 15 and len(errors) == 30 - over.completed == 30 - sum(world.answered.values())
    codes = {line["response"]["body"]["error"]["code"] for line in errors}  # type: ignore[index]  # of a failed line
    assert codes == {"batch_results_too_large"}


async def test_an_answer_that_is_no_json_is_an_error_of_its_line() -> None:
    class Streaming(World):
        async def answer(self, call: Call, given: Body) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await call.send({"type": "http.response.start", "status": 200, "headers": headers})
            await call.send({"type": "http.response.body", "body": b"data: [DONE]"})

    world = await Streaming().open()
    await (await world.take(await world.batch(1))).run()
    (line,) = await world.lines((await world.record()).error_file_id)
    assert line["response"]["status_code"] == 400  # type: ignore[index]  # of a failed line


async def test_results_of_all_sizes_are_read_in_bounded_pages() -> None:
    class Counting(MemoryBus):
        sizes: ClassVar[list[int]] = []

        async def read(self, stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
            messages = await super().read(stream, subject, limit, from_sequence)
            self.sizes.append(sum(len(message.data) for message in messages))
            return messages

    bus = Counting()
    world = await World(bus=bus).open()
    for number in range(1, 1201):
        size = 300_000 if 600 < number <= 620 else 10
        body = json.dumps(random.Random(number).randbytes(size // 2).hex()).encode()
        await world.journal.add("batch_1", LineResult(number=number, custom_id="c", status=200, body=body))
    found = [result.number async for result in world.journal.results("batch_1")]
    assert found == list(range(1, 1201)) and len(bus.sizes) < 80 and max(bus.sizes) < 6_000_000
    assert (await world.journal.done("batch_1")).numbers == set(found)
