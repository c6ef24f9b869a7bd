"""What others have queued and not told of, by the gaps in the numbers of the stream."""

import pytest

from headrace_router.arrivals import MEMORY, Arrivals, Kind

CHAT: Kind = ("m", False)
BATCH: Kind = ("m", True)
OTHER: Kind = ("other", False)


def test_gaps_between_own_numbers_are_others_requests() -> None:
    arrivals = Arrivals()
    arrivals.add(100, CHAT)
    mark = arrivals.mark([100])
    assert arrivals.untold(mark, CHAT) == 0
    arrivals.add(104, CHAT)
    arrivals.add(105, CHAT)
    assert arrivals.untold(mark, CHAT) == 3
    assert arrivals.before(mark, 104, CHAT) == 3
    assert arrivals.before(mark, 105, CHAT) == 4, "our own between them counts too"


def test_what_was_told_late_is_missing_from_where_it_was_told() -> None:
    """The other router spoke when 100 was the newest; by now our own 103 and 104 show that three more have come."""
    arrivals = Arrivals()
    arrivals.add(100, CHAT)
    arrivals.add(103, CHAT)
    arrivals.add(104, CHAT)
    mark = arrivals.mark([100])
    assert arrivals.untold(mark, CHAT) == 2
    arrivals.add(106, CHAT)
    assert arrivals.untold(mark, CHAT) == 3


def test_with_several_others_each_has_its_share_of_the_gap() -> None:
    arrivals = Arrivals()
    arrivals.hear(100)
    arrivals.hear(110)
    arrivals.add(111, CHAT)
    assert arrivals.untold(arrivals.mark([100, 110]), CHAT) == pytest.approx(5)


def test_of_other_models_and_of_the_batch_lane_are_as_many_as_of_our_own() -> None:
    arrivals = Arrivals()
    for number, kind in enumerate([CHAT, BATCH, OTHER, OTHER] * 5):
        arrivals.add(number + 1, kind)
    mark = arrivals.mark([20])
    arrivals.hear(60)
    assert arrivals.untold(mark, CHAT) == pytest.approx(40 / 4)
    assert arrivals.untold(mark, BATCH) == pytest.approx(40 / 2), "who comes in the batch lane waits for both"
    assert arrivals.untold(mark, ("unknown", False)) == 0


def test_what_came_while_nothing_could_be_heard_is_not_taken_for_new() -> None:
    arrivals = Arrivals()
    never_heard = arrivals.mark([])
    arrivals.add(5000, CHAT)
    assert arrivals.untold(never_heard, CHAT) == 0
    arrivals.forget()
    after_outage = arrivals.mark([])
    arrivals.add(9000, CHAT)
    assert arrivals.untold(after_outage, CHAT) == arrivals.before(after_outage, 9000, CHAT) == 0


def test_routers_that_tell_no_numbers_leave_gaps_unexplained() -> None:
    """Of an earlier version. Each gap would grow with all that they ever queue."""
    arrivals = Arrivals()
    arrivals.add(10, CHAT)
    mark = arrivals.mark([10, 0])
    arrivals.add(500, CHAT)
    assert arrivals.untold(mark, CHAT) == arrivals.before(mark, 500, CHAT) == 0


def test_numbers_that_begin_anew_count_nothing() -> None:
    arrivals = Arrivals()
    arrivals.add(1000, CHAT)
    mark = arrivals.mark([1000])
    arrivals.add(3, CHAT)
    assert arrivals.untold(mark, CHAT) == arrivals.before(mark, 3, CHAT) == 0


def test_memory_is_bounded() -> None:
    arrivals = Arrivals()
    for number in range(MEMORY + 100):
        arrivals.add(number + 1, (f"model-{number}", False))
    mark = arrivals.mark([MEMORY + 100])
    arrivals.hear(2 * MEMORY + 100)
    assert arrivals.untold(mark, ("model-0", False)) == 0
    assert arrivals.untold(mark, (f"model-{MEMORY}", False)) == pytest.approx(1)


def test_a_queue_that_was_made_anew_counts_far_higher_and_is_no_crowd() -> None:
    arrivals = Arrivals()
    arrivals.add(5000, CHAT)
    mark = arrivals.mark([])
    arrivals.add(1_780_000_000_000_000, CHAT)
    assert arrivals.untold(mark, CHAT) == 0
    assert arrivals.before(mark, 1_780_000_000_000_000, CHAT) == 0
    again = arrivals.mark([])
    arrivals.hear(1_780_000_000_000_004)
    assert arrivals.untold(again, CHAT) == 4
