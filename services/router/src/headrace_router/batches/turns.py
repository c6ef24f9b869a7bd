"""Which batches may be worked on now. Pure; every router comes to the same answer from the same batches."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace_router.batches.record import BatchRecord, BatchState


class ActiveLimits(NamedTuple):
    total: int
    per_owner: int


def turns(batches: Iterable[BatchRecord], limits: ActiveLimits, now: float) -> set[str]:
    """Ids. Those that have begun go on; then the owners take turns, each with its oldest. What only has to be ended
    costs next to nothing and never waits."""
    ending: set[str] = set()
    begun: list[BatchRecord] = []
    waiting: list[BatchRecord] = []
    for batch in batches:
        if batch.is_over:
            continue
        if batch.state in (BatchState.CANCELLING, BatchState.FINALIZING) or now >= batch.expires_at:
            ending.add(batch.batch_id)
        else:
            (begun if batch.started_at else waiting).append(batch)
    chosen = {batch.batch_id for batch in begun}
    num_free = max(0, limits.total - len(chosen))
    in_turn = [turn for turn in _in_turn(begun, waiting) if turn.rank < limits.per_owner]
    chosen |= {turn.batch_id for turn in in_turn[:num_free]}
    return chosen | ending


def nearest(batches: Mapping[str, BatchRecord], most: int) -> set[str]:
    """Keys of those whose turn comes first, at most so many. None is over; those that have begun, or are being ended,
    come before all others."""
    waiting: dict[str, str] = {}
    others: list[str] = []
    for key, batch in batches.items():
        if batch.started_at or batch.state is not BatchState.VALIDATING:
            others.append(key)
        else:
            waiting[batch.batch_id] = key
    in_turn = _in_turn((batches[key] for key in others), (batches[key] for key in waiting.values()))
    return set([*others, *(waiting[turn.batch_id] for turn in in_turn)][:most])


class _Turn(NamedTuple):
    rank: int
    """How many of its owner's come before it."""
    created_at: float
    batch_id: str


def _in_turn(begun: Iterable[BatchRecord], waiting: Iterable[BatchRecord]) -> list[_Turn]:
    """The waiting ones, the next one first."""
    num_of: dict[str, int] = {}
    for batch in begun:
        num_of[batch.owner] = num_of.get(batch.owner, 0) + 1
    found = []
    for batch in sorted(waiting, key=lambda batch: (batch.created_at, batch.batch_id)):
        rank = num_of.get(batch.owner, 0)
        num_of[batch.owner] = rank + 1
        found.append(_Turn(rank, batch.created_at, batch.batch_id))
    return sorted(found)
