"""The worker's side of the credit protocol, without an engine or a broker process."""

import asyncio

import pytest

from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import (
    Admission,
    Adopt,
    FinishReason,
    Grant,
    LogMessage,
    Progress,
    ReportMessage,
    SchedulerId,
    SequenceId,
    Snapshot,
    TokenFrame,
    TokenLogprobs,
    TopLogprob,
    WorkerId,
)
from headrace_worker.engine_frames import Iteration, Reset
from headrace_worker.iteration import SequenceResult
from headrace_worker.mirror import MAX_COALESCED, Mirror
from headrace_worker.session import HEARTBEAT_S, Session
from tests.worker.loop_builders import admission

WORKER = WorkerId("worker-1")
PROMPT = [7, 8, 9]


class Bench:
    """A session on an in-process broker, with everything that it sent."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.broker = MemoryBroker(max_payload)
        self.bus = MemoryBus(self.broker)
        self.now = 100.0
        self.to_engine: list[bytes] = []
        self.num_adopted = 0
        self.sent: list[Progress | Snapshot | TokenFrame] = []
        self.session = Session(WORKER, self.bus, Mirror(4), self.to_engine.append, self._on_adopted, self.now)

    async def listen(self) -> None:
        ear = MemoryBus(self.broker)
        await ear.subscribe("progress.*", self._on_report)
        await ear.subscribe("tokens.*.*", self._on_token)

    def adopt(self, epoch: int, scheduler: str = "scheduler-1") -> None:
        self._control(Adopt(worker=WORKER, scheduler=SchedulerId(scheduler), epoch=epoch))

    def grant(self, epoch: int, number: int, *admissions: Admission, progress_seen: int = 0) -> None:
        self._control(
            Grant(worker=WORKER, epoch=epoch, number=number, progress_seen=progress_seen, admissions=admissions)
        )

    def iterate(self, *rows: SequenceResult, released: tuple[int, ...] = (), generation: int = 0) -> None:
        self.begin_iteration(*rows, released=released, generation=generation)
        if self.session.has_more:
            self.session.publish(self.now)

    def begin_iteration(self, *rows: SequenceResult, released: tuple[int, ...] = (), generation: int = 0) -> None:
        ids = tuple(SequenceId(key) for key in released)
        self.session.on_iteration(Iteration(generation=generation, num_iterations=1, rows=rows, released=ids), self.now)

    async def take(self) -> list[Progress | Snapshot | TokenFrame]:
        for _ in range(3):
            await asyncio.sleep(0)
        sent, self.sent = self.sent, []
        return sent

    def _control(self, message: Adopt | Grant) -> None:
        self.session.on_control(Message("grants.worker-1", codec.encode(message)), self.now)

    def _on_adopted(self) -> None:
        self.num_adopted += 1

    def _on_report(self, message: Message) -> None:
        self.sent.append(codec.decode(message.data, ReportMessage))

    def _on_token(self, message: Message) -> None:
        event: LogMessage = codec.decode(message.data, LogMessage)
        assert isinstance(event, TokenFrame)
        self.sent.append(event)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await bench.listen()
    return bench


def row(
    sequence_id: int, num_computed: int, token: int | None = None, finish: FinishReason | None = None
) -> SequenceResult:
    return SequenceResult(SequenceId(sequence_id), num_computed, token, finish)


async def test_an_adoption_is_answered_by_a_snapshot(bench: Bench) -> None:
    bench.adopt(3)
    (snapshot,) = await bench.take()
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.epoch, snapshot.part, snapshot.num_parts, snapshot.sequences) == (3, 0, 1, ())
    assert bench.session.epoch == 3 and bench.num_adopted == 1


async def test_lower_and_equal_epochs_are_ignored(bench: Bench) -> None:
    bench.adopt(3)
    await bench.take()
    bench.adopt(3, "scheduler-2")
    bench.adopt(2, "scheduler-2")
    bench.grant(2, 1, admission(1, PROMPT, [0]))
    assert await bench.take() == [] and bench.to_engine == []
    assert bench.session.epoch == 3


async def test_first_tokens_are_on_their_way_before_the_others_are_written(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]), admission(2, PROMPT, [2, 3]))
    bench.iterate(row(1, 3, token=40))
    await bench.take()
    bench.begin_iteration(row(1, 4, token=41), row(2, 3, token=50))
    (first,) = await bench.take()
    assert isinstance(first, TokenFrame) and first.tokens == (50,)
    assert bench.session.has_more
    bench.session.publish(bench.now)
    other, progress = await bench.take()
    assert isinstance(other, TokenFrame) and other.tokens == (41,)
    assert isinstance(progress, Progress) and len(progress.sequences) == 2
    assert not bench.session.has_more


async def test_an_iteration_of_nothing_but_first_tokens_is_told_at_once(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]), admission(2, PROMPT, [2, 3]))
    await bench.take()
    bench.begin_iteration(row(1, 3, token=40), row(2, 3, token=50))
    assert not bench.session.has_more
    first, second, progress = await bench.take()
    assert isinstance(first, TokenFrame) and isinstance(second, TokenFrame) and isinstance(progress, Progress)


async def test_token_frames_go_out_before_the_progress_that_tells_of_them(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]))
    await bench.take()
    bench.iterate(row(1, 3, 60, FinishReason.LENGTH), released=(1,))
    frame, progress = await bench.take()
    assert isinstance(frame, TokenFrame) and frame.tokens == (60,)
    assert isinstance(progress, Progress)
    assert (progress.number, progress.grant_seen, progress.released) == (1, 1, (SequenceId(1),))
    assert progress.sequences[0].tokens == (60,)


async def test_grants_reach_the_engine_as_they_came(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]))
    bench.grant(1, 2)
    assert len(bench.to_engine) == 1
    assert codec.decode(bench.to_engine[0], Grant).admissions[0].sequence_id == 1


async def test_a_missing_grant_stops_all_later_ones_until_the_next_epoch(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1)
    bench.grant(1, 3, admission(1, PROMPT, [0]))
    bench.grant(1, 4, admission(2, PROMPT, [1]))
    *_, progress = await bench.take()
    assert isinstance(progress, Progress)
    assert progress.resync and progress.grant_seen == 1
    assert bench.to_engine == []
    bench.adopt(2)
    bench.grant(2, 1, admission(3, PROMPT, [0]))
    assert len(bench.to_engine) == 1


async def test_a_repeated_grant_is_applied_once(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0]))
    bench.grant(1, 1, admission(1, PROMPT, [0]))
    assert len(bench.to_engine) == 1


async def test_a_successor_learns_everything(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]), admission(2, PROMPT, [2, 3]))
    bench.iterate(row(1, 3, 60), row(2, 3, 61, FinishReason.STOP))
    bench.iterate(released=(2,))
    await bench.take()
    bench.adopt(2, "scheduler-2")
    (snapshot,) = await bench.take()
    assert isinstance(snapshot, Snapshot)
    assert [(int(s.admission.sequence_id), s.released) for s in snapshot.sequences] == [(1, False), (2, True)]
    bench.grant(2, 1)
    bench.iterate(row(1, 4, 62))
    bench.session.tick(bench.now)
    _, progress = await bench.take()
    assert isinstance(progress, Progress)
    assert (progress.epoch, progress.number, progress.sequences[0].tokens) == (2, 1, (62,))


async def test_snapshots_are_split_into_messages_that_fit() -> None:
    bench = Bench(max_payload=6000)
    await bench.listen()
    bench.adopt(1)
    for number in range(1, 11):
        bench.grant(1, number, admission(number, list(range(300)), [number]))
    await bench.take()
    bench.adopt(2)
    parts = await bench.take()
    assert len(parts) > 2
    assert all(isinstance(part, Snapshot) and part.num_parts == len(parts) for part in parts)


async def test_unimportant_progress_is_coalesced(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, range(20)))
    bench.iterate(row(1, 3, 60))
    await bench.take()
    for number in range(MAX_COALESCED):
        bench.iterate(row(1, 4 + number, 61 + number))
    sent = await bench.take()
    assert [type(message) for message in sent] == [TokenFrame] * MAX_COALESCED + [Progress]
    progress = sent[-1]
    assert isinstance(progress, Progress) and progress.sequences[0].tokens == tuple(range(61, 61 + MAX_COALESCED))


async def test_heartbeats_flow(bench: Bench) -> None:
    bench.adopt(1)
    await bench.take()
    bench.now += HEARTBEAT_S / 2
    bench.session.tick(bench.now)
    assert await bench.take() == []
    bench.now += HEARTBEAT_S
    bench.session.tick(bench.now)
    (progress,) = await bench.take()
    assert isinstance(progress, Progress) and progress.sequences == () and progress.number == 1


async def test_what_happens_during_an_outage_is_told_after_it(bench: Bench) -> None:
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]))
    bench.iterate(row(1, 3, 60))
    await bench.take()
    bench.broker.stop()
    bench.iterate(row(1, 4, 61))
    bench.iterate(row(1, 5, 62, FinishReason.LENGTH), released=(1,))
    bench.broker.start()
    bench.session.on_reconnect(bench.now)
    frame, progress = await bench.take()
    assert isinstance(frame, TokenFrame) and (frame.index, frame.tokens) == (0, (60, 61, 62))
    assert isinstance(progress, Progress) and progress.number == 2
    assert progress.sequences[0].tokens == (61, 62) and progress.released == (SequenceId(1),)


async def test_everything_is_dropped_when_cut_off_for_longer_than_the_lease(bench: Bench) -> None:
    bench.adopt(5)
    bench.grant(5, 1, admission(1, PROMPT, [0, 1]))
    bench.to_engine.clear()
    bench.now += 3.5
    bench.session.tick(bench.now)
    assert codec.decode(bench.to_engine[0], Reset).generation == 1
    assert bench.session.epoch == 0 and bench.session.mirror.num_sequences == 0
    await bench.take()
    bench.iterate(row(1, 3, 60), generation=0)
    bench.grant(5, 2, admission(2, PROMPT, [0]))
    bench.session.tick(bench.now)
    assert await bench.take() == [] and len(bench.to_engine) == 1
    # Epochs may start anew: the lease's key is forgotten with a worker that was silent for long.
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1]))
    bench.iterate(row(1, 3, 70), generation=0)
    bench.iterate(row(1, 3, 71), generation=1)
    *_, frame, _ = await bench.take()
    assert isinstance(frame, TokenFrame) and frame.tokens == (71,)


@pytest.mark.parametrize("is_log_lost", [False, True])
async def test_what_a_long_outage_made_us_drop_is_told_if_the_broker_has_lost_its_log(is_log_lost: bool) -> None:
    """Else its successor would generate from the beginning what clients have read already."""
    bench = Bench()
    await bench.listen()
    bench.adopt(5)
    bench.grant(5, 1, admission(1, PROMPT, [0, 1], output=[50]), admission(2, PROMPT, [2, 3]))
    bench.iterate(row(1, 4, 60), row(2, 3, 70))
    bench.broker.stop()
    bench.iterate(row(1, 5, 61))
    bench.now += 3.5
    bench.session.tick(bench.now)
    assert bench.session.mirror.num_sequences == 0
    bench.broker.start()
    await bench.take()
    bench.session.on_reconnect(bench.now, is_log_lost=is_log_lost)
    told = [(frame.index, frame.tokens) for frame in await bench.take() if isinstance(frame, TokenFrame)]
    assert told == ([(0, (50, 60, 61)), (0, (70,))] if is_log_lost else [])
    bench.session.on_reconnect(bench.now, is_log_lost=True)
    assert await bench.take() == [], "once"


async def test_unreadable_and_foreign_control_messages_are_dropped(bench: Bench) -> None:
    bench.session.on_control(Message("grants.worker-1", b"\xc1"), bench.now)
    adopt = Adopt(worker=WorkerId("worker-2"), scheduler=SchedulerId("s"), epoch=9)
    bench.session.on_control(Message("grants.worker-1", codec.encode(adopt)), bench.now)
    assert await bench.take() == [] and bench.session.epoch == 0


async def test_tokens_that_one_message_cannot_hold_hold_up_nobody() -> None:
    """After an outage all is published again at once: here more than the broker takes."""
    bench = Bench(max_payload=8192)
    await bench.listen()
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, range(64), max_tokens=200, num_logprobs=9), admission(2, PROMPT, [70, 71]))
    top = tuple(TopLogprob(70_000 + rank, -float(rank)) for rank in range(20))
    for number in range(200):
        bench.iterate(SequenceResult(SequenceId(1), 3 + number, number, None, None, TokenLogprobs(-1.0, top)))
    bench.iterate(row(2, 3, 60, FinishReason.LENGTH))
    await bench.take()
    bench.session.publish_again()
    bench.session.tick(bench.now + HEARTBEAT_S)
    frames = [sent for sent in await bench.take() if isinstance(sent, TokenFrame)]
    told = [frame for frame in frames if frame.request_id == f"{1:032x}"]
    assert [token for frame in told for token in frame.tokens] == list(range(200))
    assert all(len(frame.logprobs) == len(frame.tokens) for frame in told)
    assert [frame.index for frame in told][:2] == [0, len(told[0].tokens)]
    assert frames[-1].finish is FinishReason.LENGTH and not bench.session.mirror.has_unpublished


async def test_a_token_that_no_message_can_hold_fails_its_sequence_only() -> None:
    bench = Bench(max_payload=4096)
    await bench.listen()
    bench.adopt(1)
    bench.grant(1, 1, admission(1, PROMPT, [0, 1], num_logprobs=9), admission(2, PROMPT, [2, 3]))
    top = tuple(TopLogprob(70_000 + rank, -float(rank)) for rank in range(500))
    for token in (5, 6):
        bench.iterate(
            SequenceResult(SequenceId(1), 3, token, None, None, TokenLogprobs(-1.0, top)), row(2, 3, 60 + token)
        )
    sent = await bench.take()
    assert [each.tokens for each in sent if isinstance(each, TokenFrame)] == [(65,), (66,)]
    rows = {row.sequence_id: row for each in sent if isinstance(each, Progress) for row in each.sequences}
    assert rows[SequenceId(1)].error is not None and rows[SequenceId(2)].error is None
