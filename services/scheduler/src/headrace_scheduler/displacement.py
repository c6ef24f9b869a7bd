"""Makes room for a sequence by taking others off a worker: those of a lower class, or of a tenant that has more than
its fair share of the places while the sequence's tenant has less. Pure.

Who is taken off waits again with what it has generated, and stands in front of its class. Nobody is taken off more than
MAX_DISPLACED times. A class that was reached by waiting protects, but takes nobody off.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from headrace_scheduler.ledger import WorkerLedger
from headrace_scheduler.sequence import Sequence
from headrace_scheduler.stay import Stay
from headrace_shared.messages import WorkerId

MAX_DISPLACED = 3


class Displacement(NamedTuple):
    worker_id: WorkerId
    stays: list[Stay]
    """May be empty: enough blocks are on their way back already."""


def find_room(sequence: Sequence, workers: Mapping[WorkerId, WorkerLedger]) -> Displacement | None:
    """Where the least work is lost; None if there is nowhere to make room."""
    best: Displacement | None = None
    best_cost = (0, 0, WorkerId(""))
    for worker_id, ledger in workers.items():
        if not ledger.accepting or ledger.trial is not None or not ledger.can_take(sequence.request):
            continue
        stays = _victims(sequence, ledger)
        if stays is None:
            continue
        cost = (len(stays), sum(stay.num_computed for stay in stays), worker_id)
        if best is None or cost < best_cost:
            best, best_cost = Displacement(worker_id, stays), cost
    return best


def _victims(sequence: Sequence, ledger: WorkerLedger) -> list[Stay] | None:
    match = ledger.match(sequence)
    lacking = ledger.num_new_blocks(sequence, match) + ledger.pool.count_free(match.block_ids)
    lacking += ledger.headroom(sequence) - ledger.pool.num_free - ledger.pool.num_awaiting
    num_excess = len(ledger.running) + 1 - ledger.max_stays
    # Those who decode have the places of an iteration; prompts that wait for one go by rank.
    num_decoding = sum(_decodes(stay) for stay in ledger.running.values())
    decoding_excess = num_decoding + 1 - ledger.facts.max_sequences
    if lacking <= 0 and num_excess <= 0 and decoding_excess <= 0:
        return []
    candidates = sorted(
        _candidates(sequence, ledger),
        key=lambda pair: (decoding_excess > 0 and _decodes(pair[1]), pair[0].sacrifice),
        reverse=True,
    )
    taken: Counter[str] = Counter()
    victims: list[Stay] = []
    for victim, stay in candidates:
        share = victim.request.share
        if victim.level == sequence.base_level and taken[share.tenant] + 1 > share.num_running - share.fair_places:
            continue
        taken[share.tenant] += 1
        victims.append(stay)
        lacking -= ledger.pool.count_sole(stay.block_ids)
        decoding_excess -= _decodes(stay)
        if lacking <= 0 and len(victims) >= num_excess and decoding_excess <= 0:
            return victims
    return None


def _decodes(stay: Stay) -> bool:
    return stay.num_computed >= stay.known_at_start


def _candidates(sequence: Sequence, ledger: WorkerLedger) -> list[tuple[Sequence, Stay]]:
    is_below = sequence.request.share.is_below
    found = []
    for stay in ledger.running.values():
        victim = stay.sequence
        if victim is None or victim.request is sequence.request or victim.num_displaced >= MAX_DISPLACED:
            continue
        is_lower = victim.level < sequence.base_level
        is_richer = victim.level == sequence.base_level and is_below and victim.request.share.is_above
        if is_lower or is_richer:
            found.append((victim, stay))
    return found
