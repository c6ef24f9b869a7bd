"""What clients are told at several routers that fill one queue, each hearing of the others' late: how long they will
wait, and when to come back."""

import math
import random
from collections.abc import Callable, Iterator
from statistics import median

import pytest

from tests.router.crowded_fleet import CrowdedFleet
from tests.router.queueing_fleet import NUM_PLACES, NUM_WORKERS, SPEED, QueueingFleet

SECONDS = 80.0
MEAN_TOKENS = 48
CAPACITY = NUM_WORKERS * NUM_PLACES / (MEAN_TOKENS * SPEED.iteration_s(NUM_PLACES, 10))
"""Requests a second, about."""
BURST = 2 * NUM_WORKERS * NUM_PLACES
WORTH_TELLING_S = 0.5

Arrivals = Callable[[random.Random], Iterator[float]]


def poisson(draw: random.Random) -> Iterator[float]:
    at = 0.0
    while (at := at + draw.expovariate(0.95 * CAPACITY)) < SECONDS:
        yield at


def bursts(draw: random.Random) -> Iterator[float]:
    at = 1.0
    while at < SECONDS:
        yield from (at + draw.uniform(0.0, 0.5) for _ in range(BURST))
        at += draw.expovariate(0.8 * CAPACITY / BURST)


def waves(draw: random.Random) -> Iterator[float]:
    at = 0.0
    while at < SECONDS:
        at += draw.expovariate(CAPACITY * (1.05 + 0.7 * math.sin(4 * math.pi * at / SECONDS)))
        yield at


@pytest.mark.parametrize("arrivals", [poisson, bursts, waves])
@pytest.mark.parametrize("num_routers", [1, 2, 4])
def test_waits_are_as_true_with_several_routers(num_routers: int, arrivals: Arrivals) -> None:
    draw = random.Random(3)
    fleet = QueueingFleet(num_routers)
    fleet.run(arrivals(draw), draw)
    waits_were_true(fleet)


def waits_were_true(fleet: QueueingFleet, limit: float = 0.1) -> None:
    pairs = [(told.first_token_s, job.began_at - told.at) for job in fleet.jobs for told in job.told]
    errors = [(told_s - left_s) / left_s for told_s, left_s in pairs if left_s >= WORTH_TELLING_S]
    assert len(errors) > 50
    assert median(abs(error) for error in errors) < limit
    assert abs(median(errors)) < 0.8 * limit
    for router in fleet.routers:
        assert router.queue.calibration.factor == pytest.approx(1.0, abs=0.25), "there is nothing to correct"
        assert router.queue.calibration.margin < 1.7


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_burst_upon_many_free_places_is_foretold(num_routers: int) -> None:
    """Twice as many as find one; most arrive before the next forecast is made."""
    num_places = 48
    draw = random.Random(2)
    fleet = QueueingFleet(num_routers, num_places)
    size = 2 * num_places * NUM_WORKERS
    fleet.run((at + draw.uniform(0.0, 0.5) for at in (1.0, 25.0, 60.0) for _ in range(size)), draw)
    waits_were_true(fleet, limit=0.25)


@pytest.mark.parametrize("num_routers", [1, 2])
def test_who_comes_back_when_told_to_gets_in_though_many_times_more_come_than_can_be_served(num_routers: int) -> None:
    """Also with a long answer, which leaves little of the deadline to wait: those with short ones must not have made
    the queue longer than that."""
    fleet = CrowdedFleet(num_routers, 20.0, random.Random(5))
    fleet.crowd(5 * CAPACITY, 0.3 * CAPACITY, 160.0)
    assert fleet.num_returned > 50
    assert fleet.num_let_in_again >= 0.9 * fleet.num_returned
    begun = [job for job in fleet.jobs if job.began_at]
    assert sum(job.num_tokens for job in begun) >= 0.9 * 160.0 * CAPACITY * MEAN_TOKENS, "and nothing stands idle"
    assert all(job.began_at - job.arrives_at < 20.0 for job in begun)
