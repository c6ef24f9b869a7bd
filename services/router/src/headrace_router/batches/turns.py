"""Which batches may be worked on now. Pure; every router comes to the same answer from the same batches."""

from collections.abc import Iterable
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
    num_of = dict.fromkeys((batch.owner for batch in waiting), 0)
    for batch in begun:
        num_of[batch.owner] = num_of.get(batch.owner, 0) + 1
    in_turn: list[tuple[int, float, str]] = []
    for batch in sorted(waiting, key=lambda batch: (batch.created_at, batch.batch_id)):
        rank = num_of[batch.owner]
        num_of[batch.owner] = rank + 1
        if rank < limits.per_owner:
            in_turn.append((rank, batch.created_at, batch.batch_id))
    num_free = max(0, limits.total - len(chosen))
    chosen |= {batch_id for _, _, batch_id in sorted(in_turn)[:num_free]}
    return chosen | ending
