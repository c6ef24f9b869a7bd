"""What a lost worker had told its users, and not its scheduler, is found in the token log before anybody goes on."""

import asyncio

import pytest

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.look_back import WINDOW, LookBack
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.token_log import read_beyond
from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.codec import unpack_ids
from headrace_shared.errors import BusUnavailable
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import FinishReason, Outcome, Request, RequestEnded, RequestId, TokenFrame
from headrace_shared.subjects import TOKENS, tokens_subject
from tests.scheduler.builders import NOW, W1, W2, add, admissions, advance, facts, request, scheduler, snapshot, step

R1 = RequestId("r1")


def tell(bus: MemoryBus, wanted: Request, event: TokenFrame | RequestEnded) -> None:
    bus.publish(tokens_subject(wanted.router, wanted.request_id), codec.encode(event))


def frame(
    index: int, *tokens: int, choice: int = 0, attempt: int = 0, finish: FinishReason | None = None
) -> TokenFrame:
    return TokenFrame(request_id=R1, choice=choice, attempt=attempt, index=index, tokens=tokens, finish=finish)


class Site:
    """A core that has lost the worker of `r1`, which had reported the tokens 7 and 8."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker())
        self.request = request("r1", max_tokens=60)
        self.ended: list[tuple[str, str]] = []
        self.woken = asyncio.Event()
        self.core = self.make_core()
        self.look_back = LookBack(
            self.bus, lambda: self.core, on_ended=self._on_ended, wake=self.woken.set, clock=lambda: NOW
        )

    def make_core(self) -> Scheduler:
        made = scheduler(facts())
        add(made, self.request)
        step(made)
        advance(made, 1, 41, 7, 8)
        step(made)
        return made

    def lose(self) -> tuple[RequestId, ...]:
        lost = self.core.worker_lost(W1, NOW, reads_logs=True)
        self.core.check_integrity()
        self.core.add_worker(W2, facts(), (), NOW)
        assert not step(self.core).credits, "placed before the log was read"
        return lost

    async def answer(self) -> None:
        """All that was asked."""
        task = asyncio.create_task(self.look_back.run())
        try:
            async with asyncio.timeout(10.0):
                await self.woken.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _on_ended(self, request_id: RequestId, ack_subject: str) -> None:
        self.ended.append((request_id, ack_subject))


async def test_it_goes_on_behind_what_its_user_has_got() -> None:
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    for event in (frame(0, 7), frame(1, 8), frame(2, 9), frame(3, 10)):
        tell(site.bus, site.request, event)
    lost = site.lose()
    assert lost == (R1,)
    site.look_back.ask(lost, are_new=False)
    await site.answer()
    [placed] = admissions(step(site.core), W2)
    assert unpack_ids(placed.output).tolist() == [7, 8, 9, 10] and placed.attempt == 1


async def test_what_was_told_to_its_end_is_not_generated_again() -> None:
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    tell(site.bus, site.request, frame(0, 7, 8, 9, finish=FinishReason.STOP))
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    decisions = step(site.core)
    assert not decisions.credits and [ended.event.outcome for ended in decisions.ended] == [Outcome.FINISHED]


async def test_the_end_that_a_worker_tells_whom_routers_listen_to_no_more_is_not_the_end() -> None:
    """It had been taken for lost, and went on: the router listens to the next attempt by now, has got 9 and 10 of it,
    and drops all that the earlier one tells. The next attempt is lost as well, before its end: were that of the earlier
    one believed, the router would be told the end before it has the last tokens."""
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    tell(site.bus, site.request, frame(0, 7, 8))
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    [placed] = admissions(step(site.core), W2)
    told = (frame(2, 9, attempt=1), frame(2, 9), frame(3, 10, attempt=1), frame(3, 10), frame(4, 11))
    for event in (*told, frame(5, 12, finish=FinishReason.STOP)):
        tell(site.bus, site.request, event)
    advance(site.core, placed.sequence_id, 44, 9, 10, worker=W2)
    lost = site.core.worker_lost(W2, NOW, reads_logs=True)
    site.core.add_worker(W1, facts(), (), NOW)
    site.woken.clear()
    site.look_back.ask(lost, are_new=False)
    await site.answer()
    decisions = step(site.core)
    [again] = admissions(decisions)
    assert not decisions.ended and again.attempt == 2
    assert unpack_ids(again.output).tolist() == [7, 8, 9, 10]


async def test_a_request_that_has_ended_is_only_acknowledged() -> None:
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    tell(site.bus, site.request, RequestEnded(request_id=R1, outcome=Outcome.CANCELLED))
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    assert site.ended == [("r1", "ack.r1")] and not step(site.core).ended and site.core.request(R1) is None


async def test_without_a_log_it_goes_on_with_what_is_known() -> None:
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    [placed] = admissions(step(site.core), W2)
    assert unpack_ids(placed.output).tolist() == [7, 8]


async def test_a_log_that_cannot_be_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_scheduler.look_back.RETRY_S", 0.01)
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    tell(site.bus, site.request, frame(0, 7, 8, 9))
    num_left = 3
    last = site.bus.last

    async def fails_first(stream: str, subject: str) -> Message | None:
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            raise BusUnavailable("away")
        return await last(stream, subject)

    monkeypatch.setattr(site.bus, "last", fails_first)
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    assert unpack_ids(admissions(step(site.core), W2)[0].output).tolist() == [7, 8, 9]


async def test_a_core_that_was_replaced_wants_no_answer() -> None:
    site = Site()
    await site.bus.ensure_stream(TOKENS)
    former = site.core
    site.look_back.ask(site.lose(), are_new=False)
    site.core = site.make_core()
    site.look_back.ask(site.lose(), are_new=False)
    await site.answer()
    assert not step(former).credits and len(admissions(step(site.core), W2)) == 1


def test_a_worker_that_is_back_before_the_log_was_read_keeps_what_it_has() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60))
    [placed] = admissions(step(made))
    advance(made, 1, 41, 7, 8)
    lost = made.worker_lost(W1, NOW, reads_logs=True)
    adoption = made.add_worker(W1, facts(), [snapshot(placed, 7, 8, 9, num_computed=42)], NOW, reads_logs=True)
    assert (adoption.adopted, adoption.dropped) == ((), ())
    made.restore(lost[0], {0: ChoiceLog((7, 8, 9), 0)}, NOW)
    made.check_integrity()
    assert made.gauges().num_running == 1 and not admissions(step(made))


def test_what_a_worker_has_dropped_waits_for_its_log_too() -> None:
    made = scheduler(facts())
    add(made, request("r1", max_tokens=60), request("r2", max_tokens=60))
    [_, kept] = admissions(step(made))
    adoption = made.add_worker(W1, facts(), [snapshot(kept)], NOW, reads_logs=True)
    assert adoption.dropped == (R1,)
    assert not admissions(step(made))
    made.restore(R1, {0: ChoiceLog((7,), 0)}, NOW)
    made.check_integrity()
    [placed] = admissions(step(made))
    assert unpack_ids(placed.output).tolist() == [7] and placed.attempt == 1


def test_who_was_about_to_leave_a_worker_that_is_lost_waits_for_its_log_too() -> None:
    made = scheduler(facts(), facts())
    add(made, request("r1", max_tokens=60))
    step(made)
    made.set_accepting(W1, False)
    made.evacuate(W1)
    assert step(made).credits[W1].releases == [1]
    assert made.worker_lost(W1, NOW, reads_logs=True) == (R1,)
    made.check_integrity()
    assert not step(made).credits
    made.restore(R1, {0: ChoiceLog((7, 8), 0)}, NOW)
    [placed] = admissions(step(made), W2)
    assert unpack_ids(placed.output).tolist() == [7, 8]


@pytest.mark.parametrize("window", [0, 3, WINDOW])
async def test_the_end_of_a_long_log_is_found_among_others(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryBroker())
    await bus.ensure_stream(TOKENS)
    wanted, other = request("r1"), request("r2")
    for index in range(200):
        tell(bus, wanted, frame(index, index))
        tell(bus, other, frame(index, 5))
    num_read: list[int] = []
    read = bus.read

    async def counted(stream: str, subject: str, limit: int, from_sequence: int = 1) -> list[Message]:
        messages = await read(stream, subject, limit, from_sequence)
        num_read.append(len(messages))
        return messages

    monkeypatch.setattr(bus, "read", counted)
    log = await read_beyond(bus, wanted, {0: ChoiceLog(range(195), 0)}, window)
    assert log.choices[0].output == tuple(range(200)) and not log.has_ended
    assert num_read == ([200] if window == WINDOW else [1 + window // 2, 200])
