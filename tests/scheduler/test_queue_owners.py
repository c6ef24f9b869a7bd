"""Which scheduler takes from which queue."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace_scheduler.queue_owners import MAX_STOLEN, owners, to_steal


@given(st.integers(1, 16), st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True))
def test_queues_are_dealt_out_evenly_and_the_same_in_any_order(num_queues: int, schedulers: list[str]) -> None:
    found = owners(num_queues, "m/0", schedulers)
    assert len(found) == num_queues and set(found) <= set(schedulers)
    assert max(Counter(found).values()) <= -(-num_queues // len(schedulers))
    assert owners(num_queues, "m/0", schedulers[::-1]) == found


def test_few_queues_move_when_a_scheduler_comes_or_goes() -> None:
    names = [f"scheduler-{number}" for number in range(4)]
    before = owners(8, "m/0", names)
    after = owners(8, "m/0", names[:3])
    assert sum(old != new for old, new in zip(before, after, strict=True) if old != names[3]) <= 3
    assert len({tuple(owners(8, f"m/{flow}", names)) for flow in range(8)}) > 1, "not all flows at the same one"
    assert owners(8, "m/0", []) == []


def test_an_idle_scheduler_takes_half_of_the_fullest_queue() -> None:
    assert to_steal([0, 7, 3], room=10) == (1, 4)
    assert to_steal([1], room=10) == (0, 1)
    assert to_steal([1000], room=100) == (0, MAX_STOLEN)
    assert to_steal([5], room=2) == (0, 2)
    assert to_steal([0, 0], room=5) is None and to_steal([], room=5) is None and to_steal([5], room=0) is None
