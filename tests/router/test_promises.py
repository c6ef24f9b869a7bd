"""Who is told when to come back, and who is let in for it."""

import pytest

from headrace_router.promises import HORIZON_S, LATE_S, MAX_EQUAL, MAX_PROMISES, Promises, pack, unpack


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big")


def test_those_refused_together_come_back_one_after_the_other() -> None:
    promises = Promises()
    waits = [promises.book(digest(number), 5.0, 2.0, 100.0) for number in range(10)]
    assert waits[0] == 5.0 and waits == sorted(waits)
    assert waits[-1] == pytest.approx(5.0 + 9 * 2.0 * promises.return_share)


def test_a_promise_is_due_at_its_time_and_kept_once() -> None:
    promises = Promises()
    wait_s = promises.book(b"a" * 8, 5.0, 1.0, 100.0)
    assert not promises.is_due(b"a" * 8, 101.0)
    assert promises.is_due(b"a" * 8, 100.0 + wait_s)
    assert promises.keep(b"a" * 8, 100.0 + wait_s)
    assert not promises.is_due(b"a" * 8, 100.0 + wait_s) and len(promises) == 0
    assert not promises.keep(b"b" * 8, 100.0 + wait_s)


def test_nobody_is_told_more_than_the_horizon() -> None:
    promises = Promises()
    waits = [promises.book(digest(number), 1.0, 10.0, 0.0) for number in range(1000)]
    assert max(waits) == HORIZON_S


def test_who_comes_too_late_has_not_come_back_and_bookings_become_denser() -> None:
    promises = Promises()
    for number in range(200):
        promises.book(digest(number), 1.0, 0.01, 0.0)
    before = promises.return_share
    assert not promises.is_due(digest(0), 2.0 + LATE_S)
    promises.book(digest(1000), 1.0, 0.01, 10.0 + LATE_S)
    assert promises.return_share < before / 2 and len(promises) == 1


def test_clients_that_do_come_back_space_the_bookings() -> None:
    promises = Promises()
    for number in range(200):
        wait_s = promises.book(digest(number), 1.0, 0.01, float(number))
        assert promises.keep(digest(number), number + wait_s)
    assert promises.return_share > 0.9


def test_the_number_of_promises_is_bounded() -> None:
    promises = Promises()
    for _ in range(2 * MAX_EQUAL):
        promises.add(b"same" * 2, 50.0, 0.0)
    assert len(promises) == MAX_EQUAL
    for number in range(MAX_PROMISES + 10):
        promises.add(digest(number), 50.0, 0.0)
    assert len(promises) <= MAX_PROMISES


def test_other_routers_read_what_was_packed() -> None:
    packed = pack(digest(1), 12.34) + pack(digest(2), 0.0)
    assert list(unpack(packed)) == [(digest(1), 12.3), (digest(2), 0.0)]
    assert list(unpack(packed[:-1])) == [(digest(1), 12.3)]
