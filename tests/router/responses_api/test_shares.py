"""Nobody fills the store of responses alone."""

from headrace_router.responses_api import shares
from headrace_router.responses_api.shares import Shares

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_each_owner_has_a_share_of_its_own() -> None:
    each = Shares(100, Clock())
    each.fill("a", 60)
    each.fill("a", 40)
    assert not each.has_room("a", 1) and each.has_room("a", 0) and each.has_room("b", 100)


def test_what_is_deleted_makes_room() -> None:
    clock = Clock()
    each = Shares(100, clock)
    each.fill("a", 60)
    clock.now += 2 * HOUR_S
    each.fill("a", 40)
    each.free("a", 50)
    assert each.has_room("a", 50) and not each.has_room("a", 51)
    each.free("a", 1000)
    each.free("b", 5)
    assert each.has_room("a", 100) and not each.has_room("b", 101)


def test_what_is_older_than_a_day_does_not_count() -> None:
    clock = Clock()
    each = Shares(100, clock)
    each.fill("a", 100)
    clock.now += 23 * HOUR_S
    assert not each.has_room("a", 1)
    clock.now += 2 * HOUR_S
    assert each.has_room("a", 100)
    each.fill("a", 30)
    assert each.has_room("a", 70) and not each.has_room("a", 71)


def test_owners_are_bounded() -> None:
    shares_of = Shares(100, Clock())
    for number in range(shares.MAX_OWNERS + 1):
        shares_of.fill(str(number), 100)
    assert shares_of.has_room("0", 1) and not shares_of.has_room("1", 1)
