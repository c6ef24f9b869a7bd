"""Who is told when to come back, and who is let in for it."""

import heapq
from collections import Counter
from random import Random

import pytest

from headrace_router.promises import (
    HORIZON_S,
    LATE_S,
    MAX_EQUAL,
    MAX_PROMISES,
    Promises,
    pack,
    pack_kept,
    unpack,
    unpack_kept,
)


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_those_refused_together_come_back_one_after_the_other() -> None:
    promises = Promises()
    waits = [promises.book("m", digest(number), 5.0, 2.0, 100.0) for number in range(10)]
    assert waits[0] == 5.0 and waits == sorted(waits)
    assert waits[-1] == pytest.approx(5.0 + 9 * 2.0 * promises.return_share)


def test_never_more_come_back_at_a_time_than_the_fleet_can_serve() -> None:
    """Of 86 that are refused in a second 3 in a hundred come back, which nobody knows at first."""
    promises, random = Promises(), Random(1)
    spacing_s = 0.1
    coming: list[tuple[float, bytes]] = []
    came: Counter[int] = Counter()
    for number in range(86 * 300):
        now = number / 86
        while coming and coming[0][0] <= now:
            at, who = heapq.heappop(coming)
            came[int(at / 10)] += promises.keep(who, at)
        wait_s = promises.book("m", digest(number), 1.0, spacing_s, now)
        if random.random() < 0.03:
            heapq.heappush(coming, (now + wait_s * random.uniform(1.0, 1.2), digest(number)))
    assert max(came.values()) * spacing_s <= 10.0
    # Once it is known nobody waits for long, and all that could come do.
    assert promises.book("m", digest(1 << 40), 1.0, spacing_s, 300.0) < 25.0
    assert sum(came[ten_s] for ten_s in range(20, 30)) == pytest.approx(100 * 86 * 0.03, rel=0.25)


def test_a_promise_is_due_at_its_time_and_kept_once() -> None:
    promises = Promises()
    wait_s = promises.book("m", b"a" * 8, 5.0, 1.0, 100.0)
    assert not promises.is_due(b"a" * 8, 101.0)
    assert promises.is_due(b"a" * 8, 100.0 + wait_s)
    assert promises.keep(b"a" * 8, 100.0 + wait_s)
    assert not promises.is_due(b"a" * 8, 100.0 + wait_s) and len(promises) == 0
    assert not promises.keep(b"b" * 8, 100.0 + wait_s)


def test_nobody_is_told_more_than_the_horizon() -> None:
    promises = Promises()
    waits = [promises.book("m", digest(number), 1.0, 10.0, 0.0) for number in range(1000)]
    assert max(waits) == HORIZON_S


def test_who_comes_too_late_has_not_come_back_and_bookings_become_denser() -> None:
    promises = Promises()
    for number in range(200):
        promises.book("m", digest(number), 1.0, 0.01, 0.0)
    before = promises.return_share
    assert not promises.is_due(digest(0), 2.0 + LATE_S)
    promises.book("m", digest(1000), 1.0, 0.01, 10.0 + LATE_S)
    assert promises.return_share < before / 2 and len(promises) == 1


def test_clients_that_do_come_back_space_the_bookings() -> None:
    promises = Promises()
    for number in range(200):
        wait_s = promises.book("m", digest(number), 1.0, 0.01, float(number))
        assert promises.keep(digest(number), number + wait_s)
    assert promises.return_share > 0.9


def test_the_number_of_promises_is_bounded() -> None:
    promises = Promises()
    for _ in range(2 * MAX_EQUAL):
        promises.add("m", b"same" * 2, 50.0, 0.0)
    assert len(promises) == MAX_EQUAL
    for number in range(MAX_PROMISES + 10):
        promises.add("m", digest(number), 50.0, 0.0)
    assert len(promises) <= MAX_PROMISES


def test_other_routers_read_what_was_packed() -> None:
    packed = pack(digest(1), 12.34) + pack(digest(2), 0.0)
    assert list(unpack(packed)) == [(digest(1), 12.3), (digest(2), 0.0)]
    assert list(unpack(packed[:-1])) == [(digest(1), 12.3)]
    assert list(unpack_kept(pack_kept([digest(1), digest(2)]))) == [digest(1), digest(2)]
    assert list(unpack_kept(pack_kept([digest(1), digest(2)])[:-1])) == [digest(1)]


def test_what_another_router_has_promised_is_not_given_away_again() -> None:
    here, there = Promises(), Promises()
    for number in range(5):
        here.add("m", digest(number), 100.0 + there.book("m", digest(number), 5.0, 2.0, 100.0), 100.0)
    assert here.book("m", b"z" * 8, 5.0, 2.0, 100.0) == pytest.approx(5.0 + 5 * 2.0 * here.return_share)
    assert here.is_due(digest(0), 105.0)


def test_promises_of_one_model_make_nobody_else_wait() -> None:
    promises = Promises()
    for number in range(20):
        promises.book("slow", digest(number), 1.0, 10.0, 0.0)
    assert promises.book("fast", digest(100), 1.0, 0.1, 0.0) == 1.0


def test_who_comes_back_at_another_router_has_come_back() -> None:
    here, there = Promises(), Promises()
    for number in range(200):
        now = float(number)
        wait_s = there.book("m", digest(number), 1.0, 0.01, now)
        here.add("m", digest(number), now + wait_s, now)
        assert there.keep(digest(number), now + wait_s) and here.keep(digest(number), now + wait_s)
    assert len(here) == 0, "nobody comes in twice for one promise"
    here.settle(1000.0)
    there.settle(1000.0)
    assert here.return_share == there.return_share > 0.9


def test_promises_lapse_also_when_none_are_made() -> None:
    promises = Promises()
    promises.book("m", digest(1), 1.0, 1.0, 0.0)
    promises.settle(2.0 + LATE_S)
    assert len(promises) == 0
