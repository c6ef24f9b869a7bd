"""Whose turn it is: bounded, fair, and the same wherever it is asked."""

import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace_router.batches.record import BatchRecord, BatchState
from headrace_router.batches.turns import ActiveLimits, nearest, turns
from tests.router.batches.records import NEW

LIMITS = ActiveLimits(total=4, per_owner=2)
NOW = 500.0


def batch(batch_id: str, owner: str = "a", created_at: int = 100, **changes: object) -> BatchRecord:
    return replace(NEW, batch_id=batch_id, owner=owner, created_at=created_at, **changes)


def test_the_oldest_of_each_owner_in_turn() -> None:
    many = [batch(f"a{n}", "a", 100 + n) for n in range(10)]
    assert turns(many, LIMITS, NOW) == {"a0", "a1"}
    others = [batch("b", "b", 300), batch("c", "c", 200), batch("d", "d", 400)]
    assert turns([*many, *others], LIMITS, NOW) == {"a0", "b", "c", "d"}


def test_what_has_begun_goes_on() -> None:
    begun = [batch(f"a{n}", "a", 300, started_at=1, state=BatchState.IN_PROGRESS) for n in range(3)]
    waiting = [batch("a-old", "a", 1), batch("b", "b", 400), batch("c", "c", 401)]
    assert turns([*begun, *waiting], LIMITS, NOW) == {"a0", "a1", "a2", "b"}


def test_what_only_has_to_be_ended_never_waits() -> None:
    ending = [batch(f"x{n}", state=BatchState.CANCELLING) for n in range(20)]
    late = [batch(f"y{n}", expires_at=499) for n in range(20)]
    files = [batch(f"z{n}", state=BatchState.FINALIZING, started_at=1) for n in range(20)]
    over = [batch(f"o{n}", state=BatchState.COMPLETED) for n in range(20)]
    chosen = turns([*ending, *late, *files, *over, batch("new")], LIMITS, NOW)
    assert chosen == {record.batch_id for record in (*ending, *late, *files)} | {"new"}


def test_the_nearest_are_those_that_run_and_the_first_of_each_owner() -> None:
    many = {f"a{n}": batch(f"a{n}", "a", 100 + n) for n in range(10)}
    others = {
        "b0": batch("b0", "b", 300),
        "b1": batch("b1", "b", 301),
        "run": batch("run", "a", 400, started_at=1, state=BatchState.IN_PROGRESS),
        "end": batch("end", "b", 500, state=BatchState.CANCELLING),
    }
    assert nearest(many | others, 4) == {"run", "end", "a0", "b0"}
    assert nearest(many | others, 6) == {"run", "end", "a0", "a1", "b0", "b1"}
    assert nearest(many | others, 100) == set(many) | set(others)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=30),
    st.randoms(use_true_random=False),
)
def test_bounds_hold_and_the_order_of_hearing_does_not_matter(
    told: list[tuple[str, int, bool]], chance: random.Random
) -> None:
    batches = [
        batch(str(number), owner, at, started_at=1 if begun and number < 4 else 0)
        for number, (owner, at, begun) in enumerate(told)
    ]
    chosen = turns(batches, LIMITS, NOW)
    shuffled = list(batches)
    chance.shuffle(shuffled)
    assert turns(shuffled, LIMITS, NOW) == chosen and len(chosen) <= LIMITS.total
    waiting = [record for record in batches if not record.started_at]
    if waiting and len(chosen) < LIMITS.total:
        for owner in {record.owner for record in waiting}:
            own = [record for record in batches if record.owner == owner]
            num_chosen = sum(record.batch_id in chosen for record in own)
            assert num_chosen >= min(len(own), LIMITS.per_owner)
