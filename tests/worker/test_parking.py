"""Drain, park and promote at the worker: a real engine process with the scripted engine, an in-process broker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import CommandKind, CommandReply, WorkerCommand, WorkerState
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Adopt, DrainVerdict, Grant, SchedulerId, WorkerId
from headrace_shared.model_cards import load_card
from headrace_shared.subjects import commands_subject, grants_subject, replies_subject
from headrace_worker.commands import TYPICAL_PROMOTION_S
from tests.scripted_engine import expected_output
from tests.worker.loop_builders import admission
from tests.worker.service_bench import PROMPT, Bench

WORKER = WorkerId("worker-1")
SCHEDULER = SchedulerId("scheduler-1")
DRAIN, PARK, PROMOTE = CommandKind.DRAIN, CommandKind.PARK, CommandKind.PROMOTE


class Commanded(Bench):
    """`ear` stands in for scheduler and autoscaler."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.ear = MemoryBus(self.broker)
        self.replies: list[CommandReply] = []
        self.num_commands = 0

    async def start(self) -> None:
        await self.ear.subscribe(replies_subject("me"), self._on_reply)
        await super().start()

    def command(self, kind: CommandKind, epoch: int = 0) -> None:
        """Named after its kind, and numbered."""
        self.num_commands += 1
        command_id = f"{kind.value}-{self.num_commands}"
        command = WorkerCommand(
            worker=WORKER, kind=kind, command_id=command_id, sender="me", epoch=epoch, sent_at=time.time()
        )
        self.ear.publish(commands_subject(WORKER), codec.encode(command))

    def judge(self, *, is_granted: bool, epoch: int = 1) -> None:
        verdict = DrainVerdict(worker=WORKER, epoch=epoch, is_granted=is_granted)
        self.ear.publish(grants_subject(WORKER), codec.encode(verdict))

    def adopt(self, epoch: int) -> None:
        self.control(Adopt(worker=WORKER, scheduler=SCHEDULER, epoch=epoch))

    def admit(self, epoch: int, number: int, sequence_id: int, max_tokens: int) -> None:
        taken = admission(sequence_id, PROMPT, range(8), max_tokens=max_tokens)
        self.control(Grant(worker=WORKER, epoch=epoch, number=number, progress_seen=0, admissions=(taken,)))

    @property
    def state(self) -> WorkerState:
        return self.hellos[-1].state

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.hellos[-1], self.replies)
            await asyncio.sleep(0.01)

    async def until_now(self, state: WorkerState) -> None:
        await self.until(lambda: bool(self.hellos) and self.state is state)

    async def exit_code(self) -> int:
        assert self.task is not None
        return await asyncio.wait_for(self.task, 15.0)

    def _on_reply(self, message: Message) -> None:
        self.replies.append(codec.decode(message.data, CommandReply))


@pytest.fixture
async def bench() -> AsyncIterator[Commanded]:
    bench = Commanded()
    await bench.start()
    await bench.until_now(WorkerState.READY)
    yield bench
    await stop(bench)


@pytest.fixture
async def parked() -> AsyncIterator[Commanded]:
    bench = Commanded(parked=True)
    await bench.start()
    await bench.until_now(WorkerState.PARKED)
    yield bench
    await stop(bench)


async def stop(bench: Commanded) -> None:
    if bench.task is not None:
        bench.task.cancel()
        await asyncio.gather(bench.task, return_exceptions=True)


async def test_starts_parked_without_having_been_ready(parked: Commanded) -> None:
    assert [hello.state for hello in parked.hellos if hello.state is WorkerState.READY] == []
    assert parked.hellos[0].is_parking and not parked.hellos[-1].is_parking
    assert parked.hellos[-1].promotion_s == TYPICAL_PROMOTION_S
    assert parked.hellos[-1].num_blocks == 256
    assert await load_card(parked.bus, "scripted") is not None
    assert parked.service.not_ready() is None  # to those who watch over processes it is well


async def test_obeys_no_scheduler_while_parked_and_the_next_one_once_promoted(parked: Commanded) -> None:
    parked.adopt(7)
    parked.admit(7, 1, 1, 4)
    await asyncio.sleep(0.3)
    assert parked.tokens == [] and parked.hellos[-1].epoch == 0
    parked.command(PROMOTE)
    await parked.until_now(WorkerState.READY)
    parked.adopt(8)
    parked.admit(8, 1, 2, 30)
    await parked.until(lambda: len(parked.tokens) == 30)
    assert parked.tokens == expected_output(PROMPT, 0, 0, 30)
    assert [reply.is_accepted for reply in parked.replies] == [True]


async def test_tells_how_long_its_last_promotion_took(parked: Commanded) -> None:
    parked.command(PROMOTE)
    await parked.until_now(WorkerState.READY)
    await asyncio.sleep(0.2)
    parked.adopt(1)
    await parked.until(lambda: parked.hellos[-1].epoch == 1)
    parked.command(PARK)
    await parked.until_now(WorkerState.DRAINING)
    parked.judge(is_granted=True)
    await parked.until_now(WorkerState.PARKED)
    assert 0.1 < parked.hellos[-1].promotion_s < 60.0 and parked.hellos[-1].promotion_s != TYPICAL_PROMOTION_S


async def test_parked_while_a_sequence_runs_it_ends_that_first(bench: Commanded) -> None:
    bench.adopt(1)
    bench.admit(1, 1, 1, 100)
    await bench.until(lambda: len(bench.tokens) > 3)
    bench.command(PARK, epoch=5)
    await bench.until_now(WorkerState.DRAINING)
    assert bench.hellos[-1].is_parking and bench.hellos[-1].command_epoch == 5
    bench.judge(is_granted=True)
    await bench.until_now(WorkerState.PARKED)
    assert bench.tokens == expected_output(PROMPT, 0, 0, 100)
    assert (bench.replies[0].is_accepted, bench.replies[0].state) == (True, WorkerState.DRAINING)
    # And again, from the beginning: no block holds what it held.
    bench.tokens.clear()
    bench.command(PROMOTE, epoch=5)
    await bench.until_now(WorkerState.READY)
    bench.adopt(2)
    bench.admit(2, 1, 2, 40)
    await bench.until(lambda: len(bench.tokens) == 40)
    assert bench.tokens == expected_output(PROMPT, 0, 0, 40)


async def test_what_runs_beyond_the_limit_is_dropped_not_published(bench: Commanded) -> None:
    await stop(bench)
    bench = Commanded(drain_limit_s=0.5)
    await bench.start()
    await bench.until_now(WorkerState.READY)
    bench.adopt(1)
    bench.admit(1, 1, 1, 1000)  # which stalls when its blocks are full
    await bench.until(lambda: len(bench.tokens) > 100)
    bench.command(PARK)
    await bench.until_now(WorkerState.DRAINING)
    bench.judge(is_granted=True)
    await bench.until_now(WorkerState.PARKED)
    assert bench.hellos[-1].epoch == 0
    await stop(bench)


async def test_drained_by_a_command_it_ends_with_exit_code_zero(bench: Commanded) -> None:
    bench.adopt(1)
    bench.admit(1, 1, 1, 60)
    await bench.until(lambda: len(bench.tokens) > 3)
    bench.command(DRAIN)
    await bench.until_now(WorkerState.DRAINING)
    bench.judge(is_granted=True, epoch=0)  # not its scheduler's
    bench.judge(is_granted=True)
    assert await bench.exit_code() == 0
    assert bench.tokens == expected_output(PROMPT, 0, 0, 60)
    assert (bench.hellos[-1].state, bench.hellos[-1].failure) == (WorkerState.LEAVING, "")


async def test_called_back_it_goes_on(bench: Commanded) -> None:
    bench.adopt(1)
    bench.command(DRAIN)
    await bench.until_now(WorkerState.DRAINING)
    bench.judge(is_granted=False)
    await bench.until_now(WorkerState.READY)
    assert [reply.is_accepted for reply in bench.replies] == [False]
    bench.admit(1, 1, 1, 10)
    await bench.until(lambda: len(bench.tokens) == 10)


async def test_drained_while_it_loads() -> None:
    bench = Commanded(load_timeout_s=60.0)
    await bench.start()
    await bench.until_now(WorkerState.LOADING)
    bench.command(DRAIN)
    assert await bench.exit_code() == 0
    assert WorkerState.READY not in {hello.state for hello in bench.hellos}
    assert bench.replies[0].is_accepted


async def test_drained_while_parked(parked: Commanded) -> None:
    parked.command(DRAIN)
    assert await parked.exit_code() == 0
    assert parked.hellos[-1].state is WorkerState.LEAVING


async def test_a_former_leader_is_refused(parked: Commanded) -> None:
    parked.command(PARK, epoch=9)
    await parked.until(lambda: parked.hellos[-1].command_epoch == 9)
    parked.command(PROMOTE, epoch=8)
    await parked.until(lambda: len(parked.replies) == 2)
    assert parked.state is WorkerState.PARKED
    assert [reply.is_accepted for reply in parked.replies] == [True, False]
    assert "9" in parked.replies[1].message


async def test_promoted_while_its_connection_flaps(parked: Commanded) -> None:
    """The command arrives, the news of it and the answer do not: the next Hello tells."""
    parked.command(PROMOTE)
    await asyncio.sleep(0)
    parked.broker.stop()
    await asyncio.sleep(0.2)
    assert (parked.state, parked.replies) == (WorkerState.PARKED, [])
    parked.broker.start()
    await parked.until_now(WorkerState.READY)
    parked.command(PROMOTE)  # as an autoscaler does that has had no answer
    parked.adopt(1)
    parked.admit(1, 1, 1, 10)
    await parked.until(lambda: len(parked.tokens) == 10)


async def test_nonsense_and_commands_for_others_change_nothing(parked: Commanded) -> None:
    parked.ear.publish(commands_subject(WORKER), b"\xc1nonsense")
    other = WorkerCommand(worker=WorkerId("worker-2"), kind=PROMOTE, command_id="x", sender="me", sent_at=time.time())
    parked.ear.publish(commands_subject(WORKER), codec.encode(other))
    parked.command(PARK)
    await parked.until(lambda: bool(parked.replies))
    assert [reply.command_id for reply in parked.replies] == ["park-1"]
    assert parked.state is WorkerState.PARKED


async def test_a_command_that_somebody_kept_is_not_obeyed_again(parked: Commanded) -> None:
    kept: list[bytes] = []
    await parked.ear.subscribe(commands_subject(WORKER), lambda message: kept.append(message.data))
    parked.command(PROMOTE)
    await parked.until_now(WorkerState.READY)
    parked.adopt(1)
    parked.command(PARK)
    await parked.until(lambda: len(kept) == 2)
    parked.judge(is_granted=True)
    await parked.until_now(WorkerState.PARKED)
    num_replies = len(parked.replies)
    parked.ear.publish(commands_subject(WORKER), kept[0])
    await asyncio.sleep(0.3)
    assert parked.state is WorkerState.PARKED and len(parked.replies) == num_replies
