"""Random histories of clients, workers, messages and faults against a model worker with real block contents.

A history is a string of bytes, each an event, so that a failing one shrinks to a few. HEADRACE_HISTORIES sets how many.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_shared.messages import Outcome
from tests.scheduler.history import History, make_fleet, play_event
from tests.scheduler.model_fleet import ModelFleet

NUM_HISTORIES = int(os.environ.get("HEADRACE_HISTORIES", "1000"))


def play(data: bytes) -> ModelFleet:
    history = History(data)
    calm = history.pick(2) == 0
    fleet = make_fleet(history)
    while not history.is_over:
        play_event(history, fleet, calm=calm)
    fleet.settle()
    return fleet


@pytest.mark.timeout(300 + NUM_HISTORIES)
@settings(max_examples=NUM_HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=240, max_size=480))
def test_every_history_ends_with_the_right_answers_and_all_blocks_free(data: bytes) -> None:
    play(data)


def test_histories_reach_what_they_are_about() -> None:
    """A property that never met a preemption would say little about it."""
    fleets = [play(random.Random(seed).randbytes(360)) for seed in range(100)]
    assert sum(len(fleet.messages) for fleet in fleets) > 500
    assert sum(fleet.num_preemptions for fleet in fleets) > 20
    assert sum(fleet.num_moved for fleet in fleets) > 10
    assert sum(fleet.num_cached_tokens for fleet in fleets) > 1000
    assert sum(fleet.num_replacements for fleet in fleets) > 50
    assert sum(fleet.num_caught_up for fleet in fleets) > 10
    outcomes = {message.ended.outcome for fleet in fleets for message in fleet.messages.values() if message.ended}
    assert outcomes == {Outcome.FINISHED, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.FAILED}
