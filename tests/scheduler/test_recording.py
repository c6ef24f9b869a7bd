"""A recording replays to the same decisions and the same state, from any keyframe on."""

import random
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from headrace_scheduler import admission, recording
from headrace_scheduler.decisions import LossCause
from headrace_scheduler.events import event_names
from headrace_scheduler.placement import place
from headrace_scheduler.recording import PASS, Chunk, Recorder, dump_state, load_state
from headrace_scheduler.replay import Moment, nothing_of, replay
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.story import show, story
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import CancelReason, RequestId, WorkerId
from tests.scheduler.builders import request
from tests.scheduler.history import History, make_fleet, play_event
from tests.scheduler.model_fleet import ModelFleet


def same(left: Any, right: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Two object graphs hold the same values in the same order, whether or not equal constants are one object."""
    seen = set() if seen is None else seen
    if (id(left), id(right)) in seen:
        return True
    seen.add((id(left), id(right)))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        left, right = list(left.items()), list(right.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b, seen) for a, b in zip(left, right, strict=True))
    slots = [name for name in getattr(type(left), "__slots__", ()) if name != "observer"]
    if slots and not isinstance(left, Struct | Enum):
        return all(same(getattr(left, name), getattr(right, name), seen) for name in slots)
    return bool(left == right)


QUERIES = {"schedule", "room", "num_waiting", "oldest_wait_s", "ack_subjects", "gauges", "check_integrity", "request"}
QUERIES |= {"accepts", "adapters_of", "can_hand_over", "has_worker", "is_overdue", "observer"}


class Recorded:
    """A fleet whose schedulers are recorded; `take` after any event."""

    def __init__(self, fleet: ModelFleet) -> None:
        self.fleet = fleet
        self._recorder = Recorder("scheduler-1")
        self._core: Scheduler | None = None
        self._now = 0.0
        self.chunks: list[Chunk] = []
        self.follow()

    def follow(self) -> None:
        """The fleet may have a new scheduler."""
        if self.fleet.scheduler is not self._core:
            self.take()
            self._core = self.fleet.scheduler
            self._recorder.attach(self._core, 1000.0, 0.0)

    def take(self) -> None:
        self._now += 1.0
        data = self._recorder.take(1000.0 + self._now, self._now)
        if data is not None:
            self.chunks.append(msgspec.msgpack.decode(data, type=Chunk))


def play(seed: int) -> Recorded:
    chance = random.Random(seed)
    history = History(bytes([1]) + chance.randbytes(400))
    history.pick(2)
    recorded = Recorded(make_fleet(history))
    while not history.is_over:
        play_event(history, recorded.fleet, calm=False)
        recorded.follow()
        if chance.random() < 0.1:
            recorded.take()
    recorded.fleet.settle()
    recorded.follow()
    recorded.take()
    return recorded


@pytest.fixture
def frequent_keyframes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEYFRAME_BYTES", 2000)


@pytest.mark.parametrize("seed", range(40))
def test_a_history_replays_to_the_same_decisions_and_the_same_state(seed: int) -> None:
    recorded = play(seed)
    moments = list(replay(recorded.chunks))
    passes = [moment for moment in moments if moment.decisions is not None]
    assert len(passes) > 20 and all(moment.is_same for moment in passes)
    assert same(moments[-1].core, recorded.fleet.scheduler)
    assert {moment.name for moment in moments} <= event_names(Scheduler) | {PASS}


@pytest.mark.parametrize("seed", range(10))
def test_reading_starts_at_any_keyframe(seed: int, frequent_keyframes: None) -> None:
    recorded = play(seed)
    keyframes = [number for number, chunk in enumerate(recorded.chunks) if chunk.keyframe]
    assert len(keyframes) > 2
    for first in range(keyframes[-2] + 1):
        moments = list(replay(recorded.chunks[first:]))
        assert all(moment.is_same for moment in moments if moment.decisions is not None)
        assert same(moments[-1].core, recorded.fleet.scheduler)


def test_a_gap_is_skipped_up_to_the_next_keyframe(frequent_keyframes: None) -> None:
    recorded = play(3)
    lost = next(number for number, chunk in enumerate(recorded.chunks) if number > 2 and not chunk.keyframe)
    remaining = recorded.chunks[:lost] + recorded.chunks[lost + 1 :]
    moments = list(replay(remaining))
    assert all(moment.is_same for moment in moments if moment.decisions is not None)
    assert len(moments) < len(list(replay(recorded.chunks)))


def test_another_program_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [chunk for seed in range(8) for chunk in play(seed).chunks]
    monkeypatch.setattr(admission, "place", lambda candidates: place(list(candidates)[-1:]))
    assert any(not moment.is_same for moment in replay(chunks) if moment.decisions is not None)
    changed = [msgspec.structs.replace(chunk, fingerprint="0" * 16) for chunk in chunks]
    with pytest.raises(ProtocolError, match="another version"):
        list(replay(changed))


def test_every_method_that_changes_the_core_is_an_event() -> None:
    public = {name for name in vars(Scheduler) if not name.startswith("_")}
    assert public - QUERIES == event_names(Scheduler)


def test_a_buffer_that_nobody_fetches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BUFFERED_BYTES", 3000)
    recorder = Recorder("scheduler-1")
    core = Scheduler()
    recorder.attach(core, 0.0, 0.0)
    for number in range(1000):
        core.cancel(RequestId(f"{number:032x}"), None, CancelReason.CLIENT, float(number))
        core.schedule(float(number))
    data = recorder.take(2000.0, 2000.0)
    assert data is not None and len(data) < 10_000
    chunk = msgspec.msgpack.decode(data, type=Chunk)
    assert chunk.keyframe and all(moment.is_same for moment in replay([chunk]))


def test_a_state_survives_a_round_trip() -> None:
    fleet = play(5).fleet
    again = load_state(dump_state(fleet.scheduler))
    again.check_integrity()
    assert same(again, fleet.scheduler)
    assert again.gauges() == fleet.scheduler.gauges()


def told(recorded: Recorded, name: str) -> str:
    lines = story(recorded.chunks, RequestId(name))
    assert lines == sorted(lines, key=lambda line: line.at)
    return show(lines)


def until(recorded: Recorded, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        recorded.fleet.turn()
        recorded.follow()
    raise AssertionError("it did not come to that")


def test_a_story_tells_what_became_of_a_request() -> None:
    history = History(bytes(400))
    recorded = Recorded(make_fleet(history))
    fleet = recorded.fleet
    fleet.start_worker()
    number = len(fleet.messages)
    asked = request(name="the-one", prompt=[0, 1, 2, 0], max_tokens=8)
    fleet.send(asked)
    (message,) = [item for item in fleet.messages.values() if item.request.request_id == asked.request_id]
    fleet.deliver(message)
    until(recorded, lambda: len(message.choices[0].shown) >= 2)
    first = next(iter(fleet.links.values()))
    fleet.kill_worker(first, LossCause.VANISHED)
    fleet.settle()
    recorded.take()
    text = told(recorded, asked.request_id)
    assert number + 1 == len(fleet.messages)
    assert "taken from the queue (message 1, delivery 1): 4 prompt tokens, up to 8 new ones" in text
    assert text.count("placed on ") == 2, text
    assert "first token" in text and "lost its worker" in text
    assert re.search(r"complete with \d tokens\n.*ended: finished\n$", text), text
    assert story(recorded.chunks, RequestId("unknown")) == []
    assert all(isinstance(moment, Moment) for moment in replay(recorded.chunks))


def begun(num_choices: int = 1) -> tuple[Recorded, RequestId]:
    """A request that has its first tokens."""
    recorded = Recorded(make_fleet(History(bytes(400))))
    fleet = recorded.fleet
    fleet.start_worker()
    asked = request(name="the-one", prompt=[0, 1, 2, 0], max_tokens=16, num_choices=num_choices)
    fleet.send(asked)
    (message,) = fleet.messages.values()
    fleet.deliver(message)
    until(recorded, lambda: all(choice.shown for choice in message.choices))
    return recorded, asked.request_id


def test_a_story_says_how_each_choice_ended_before_it_says_how_the_request_did() -> None:
    recorded, name = begun(num_choices=2)
    core = recorded.fleet.scheduler
    core.cancel(name, 0, CancelReason.STOP, 5.0)
    core.cancel(name, None, CancelReason.CLIENT, 5.0)
    core.schedule(5.0)
    recorded.take()
    kinds = [line.kind for line in story(recorded.chunks, name)]
    assert kinds[-3:] == ["choice_ended", "choice_ended", "ended"] and "left" not in kinds
    assert re.search(
        r"choice 0: complete with .*\n.*choice 1: cancelled with .*\n.*ended: cancelled", told(recorded, name)
    )


@pytest.mark.parametrize(
    ("let", "text"),
    [
        (lambda core, name, workers: core.let_go(name), "left to a peer"),
        (lambda core, name, workers: [core.hand_over(each, 5.0) for each in workers], "handed over to a peer with"),
        (lambda core, name, workers: core.forget(name), "dropped: its end had been told already"),
    ],
    ids=["let_go", "hand_over", "forget"],
)
def test_a_story_of_a_request_that_went_elsewhere_ends_with_that(
    let: Callable[[Scheduler, RequestId, list[WorkerId]], object], text: str
) -> None:
    recorded, name = begun()
    core, workers = recorded.fleet.scheduler, list(recorded.fleet.links)
    core.schedule(5.0)
    let(core, name, workers)
    recorded.take()
    last = story(recorded.chunks, name)[-1]
    assert last.kind == "left" and last.text.startswith(text)


def test_whoever_asks_for_what_is_not_recorded_hears_when_the_recording_begins() -> None:
    recorded, _ = begun()
    recorded.take()
    assert nothing_of("0" * 32, recorded.chunks).startswith(
        "the recording, which begins at 1970-01-01 00:16:40Z, knows"
    )
    assert nothing_of("0" * 32, []) == "the recording is empty"
