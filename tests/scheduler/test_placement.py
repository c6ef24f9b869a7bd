import pytest

from headrace_scheduler.placement import Candidate, place
from headrace_shared.messages import WorkerId


def candidate(
    name: str, cached: int = 0, uncached: int = 100, backlog: int = 0, running: int = 0, free: int = 50
) -> Candidate:
    return Candidate(WorkerId(name), cached, uncached, backlog, running, free)


def test_nowhere_without_a_candidate() -> None:
    assert place([]) is None


@pytest.mark.parametrize(
    ("one", "two", "winner"),
    [
        (candidate("a"), candidate("b", cached=64, uncached=36), "b"),
        (candidate("a"), candidate("b", cached=64, uncached=36, backlog=500), "a"),
        (candidate("a", backlog=10), candidate("b"), "b"),
        (candidate("a", running=3), candidate("b"), "b"),
        (candidate("a", free=10), candidate("b", free=20), "b"),
        (candidate("b"), candidate("a"), "a"),
        (candidate("a", running=10), candidate("b", cached=16, uncached=84, running=20), "a"),
    ],
)
def test_the_least_work_before_the_first_token_wins(one: Candidate, two: Candidate, winner: str) -> None:
    chosen = place([one, two])
    assert chosen is not None
    assert chosen.worker_id == winner
    assert place([two, one]) == chosen
