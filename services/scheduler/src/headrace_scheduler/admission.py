"""Admits waiting sequences to workers: who is next (`waiting.py`), where there is room, and where it is best placed.

A sequence that was taken off a worker is admitted again only when that worker has confirmed it: until then it may tell
of tokens that the user has got, and behind those the sequence must go on.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace_scheduler.displacement import find_room
from headrace_scheduler.ledger import PrefixMatch, WorkerLedger
from headrace_scheduler.placement import Candidate, place
from headrace_scheduler.registry import Registry, is_prompt_computed
from headrace_scheduler.sequence import OwnedRequest, Sequence, SequenceState
from headrace_scheduler.suspects import Suspects
from headrace_scheduler.waiting import LOOKAHEAD, MAX_BYPASSED, goes_before
from headrace_shared.codec import pack_ids
from headrace_shared.messages import Admission, Outcome, SequenceId, WorkerId

ADAPTER_PATIENCE_S = 10.0
"""A sequence whose adapter no worker has is given up after so long: it was unloaded, or those that had it are gone."""
MAX_MISSING = 1024
"""Adapters of which it is known since when they are missing."""


class Promised(NamedTuple):
    """What of a worker is for those who are on their way there."""

    num_stays: int
    num_blocks: int


NOTHING_PROMISED = Promised(0, 0)


class Admitter:
    """Owns the sequence ids and the counts of what was admitted."""

    __slots__ = (
        "_missing_since",
        "_registry",
        "_suspects",
        "_workers",
        "gives_up_at",
        "next_sequence_id",
        "num_admissions",
        "num_cached_tokens",
        "num_displaced",
        "num_known_tokens",
        "num_moved",
    )

    def __init__(self, registry: Registry, workers: Mapping[WorkerId, WorkerLedger], suspects: Suspects) -> None:
        self._missing_since: dict[str, float] = {}
        """By digest: when somebody who waits first found no worker with the adapter."""
        self._registry = registry
        self._suspects = suspects
        self._workers = workers
        self.next_sequence_id = 1
        """Rises over all workers, and above every id in any snapshot: no worker meets one twice."""
        self.num_admissions = 0
        self.num_known_tokens = 0
        self.num_cached_tokens = 0
        self.num_moved = 0
        self.num_displaced = 0
        self.gives_up_at: float | None = None
        """When somebody will have waited too long for an adapter; None: nobody waits for one."""

    def admit(self) -> None:
        """Admits what fits now. Ends what no worker could ever hold."""
        registry = self._registry
        self.gives_up_at = None
        if self._missing_since:
            loaded = {digest for ledger in self._workers.values() for digest in ledger.adapters}
            self._missing_since = {key: at for key, at in self._missing_since.items() if key not in loaded}
        # An admission can wake siblings (its prompt was cached), and they stand in front.
        while registry.may_admit and self._workers:
            registry.may_admit = False
            self._pass()

    def move_from(self, source: WorkerLedger) -> None:
        """Moves requests to other workers, in the order of arrival, as many as find a place there now; the next ones
        once these have left. All choices of one that are here go together: the first one computes the prompt for the
        others."""
        if not any(ledger.accepting for ledger in self._workers.values()):
            return
        returning = [sequence for sequence in self._registry.waiting if sequence.last_attempt is not None]
        if any(sequence.is_leaving for sequence in returning):
            return
        promised: dict[WorkerId, Promised] = {}
        for one in returning:
            self._promise([one], promised)
        requests = {id(request): request for stay in source.running.values() if (request := stay.request) is not None}
        num_stuck = 0
        for request in sorted(requests.values(), key=lambda request: (request.stream_sequence, request.arrival)):
            stays = [stay for stay in source.running.values() if stay.request is request]
            sequences = [sequence for stay in stays if (sequence := stay.sequence) is not None]
            # A suspect's place is the worker of its trial, this one: it is to have another trial.
            if not request.is_suspect and not self._promise(sequences, promised):
                num_stuck += 1
                if num_stuck > LOOKAHEAD:
                    return
                continue
            for stay, sequence in zip(stays, sequences, strict=True):
                source.stop(stay, tell=True)
                self._registry.leave(sequence)
            self.num_moved += 1

    def _promise(self, sequences: list[Sequence], promised: dict[WorkerId, Promised]) -> bool:
        """Finds a place for choices of one request, the first of which computes the prompt. False: there is none."""
        placed = self._find_place(sequences[0], promised)
        if placed is None:
            return False
        worker_id, match = placed
        num_blocks = self._workers[worker_id].num_new_blocks(sequences[0], match)
        before = promised.get(worker_id, NOTHING_PROMISED)
        promised[worker_id] = Promised(before.num_stays + len(sequences), before.num_blocks + num_blocks)
        return True

    def see(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Ids in use on some worker."""
        self.next_sequence_id = max(self.next_sequence_id, max(sequence_ids, default=0) + 1)

    def _pass(self) -> None:
        walk = self._registry.waiting.walk()
        blocked: Sequence | None = None
        num_passed = num_leaving = 0
        while num_passed <= LOOKAHEAD and (sequence := walk.next()) is not None:
            if sequence.is_leaving:
                walk.skip(sequence)
                num_leaving += 1
                continue
            if num_leaving and num_leaving >= sum(ledger.num_places for ledger in self._workers.values()):
                return  # the last places are theirs, in a moment
            if self._settle(sequence):
                continue
            placed = self._find_place(sequence)
            if (placed is None or not self._workers[placed[0]].has_place) and self._displace(sequence):
                placed = self._find_place(sequence)
            if placed is None:
                walk.skip(sequence)
                if sequence.request.is_suspect or self._lacks_adapter(sequence.request):
                    continue  # it waits for its trial or its adapter, and nobody for it
                if blocked is None:
                    blocked = sequence
                    self._reserve_for(sequence)
                num_passed += 1
                continue
            self._start(sequence, *placed)
            if blocked is not None:
                blocked.num_bypassed += 1
                self._reserve_for(blocked)

    def _settle(self, sequence: Sequence) -> bool:
        """Takes out of the waiting list what need not or must not be admitted now."""
        request = sequence.request
        if sequence.is_complete:
            self._registry.end(sequence, Outcome.FINISHED)
            return True
        if not any(ledger.could_ever_hold(request) for ledger in self._workers.values()):
            self._registry.fail(
                request,
                "context_length_exceeded",
                f"{request.prompt_length} prompt tokens and up to {request.request.stop.max_tokens} new ones "
                "are more than any worker can hold.",
            )
            return True
        if self._lacks_adapter(request):
            # It may have waited for long before: the worker that had the adapter may just be starting again.
            until = max(sequence.waiting_since, self._note_missing(request)) + ADAPTER_PATIENCE_S
            if self._registry.now >= until:
                name = request.request.adapter
                self._registry.fail(request, "model_not_found", f"The model '{name}' is not loaded any more.")
                return True
            self.gives_up_at = until if self.gives_up_at is None else min(until, self.gives_up_at)
        if request.request.num_choices > 1:
            running = request.in_state(SequenceState.RUNNING)
            if running and not any(is_prompt_computed(sibling) for sibling in running):
                self._registry.park(sequence)
                return True
        return False

    def _find_place(
        self, sequence: Sequence, promised: Mapping[WorkerId, Promised] | None = None
    ) -> tuple[WorkerId, PrefixMatch] | None:
        reserved = self._registry.waiting.reserved
        own = self._suspects.place_of(sequence.request) if sequence.request.is_suspect else None
        if own is None and sequence.request.is_suspect:
            return None
        matches: dict[WorkerId, PrefixMatch] = {}
        candidates: list[Candidate] = []
        for worker_id, ledger in self._workers.items():
            taken = NOTHING_PROMISED if promised is None else promised.get(worker_id, NOTHING_PROMISED)
            # Where a running sequence is short of blocks none is free: spare the look.
            if ledger.short or ledger.num_places <= taken.num_stays:
                continue
            if own is not None and own != worker_id:
                continue
            if own is None and ledger.trial is not None:
                continue
            if own is None and _is_kept_from(sequence, worker_id, reserved):
                continue
            if not ledger.can_take(sequence.request):
                continue
            match = ledger.match(sequence)
            num_free = ledger.pool.num_free - ledger.pool.count_free(match.block_ids) - taken.num_blocks
            num_free -= ledger.num_new_blocks(sequence, match)
            if num_free < ledger.headroom(sequence):
                continue
            matches[worker_id] = match
            candidates.append(
                Candidate(
                    worker_id,
                    match.num_cached,
                    sequence.num_tokens - match.num_cached,
                    ledger.backlog,
                    len(ledger.running),
                    num_free,
                )
            )
        with_place = [candidate for candidate in candidates if self._workers[candidate.worker_id].has_place]
        best = place(with_place or candidates)
        return None if best is None else (best.worker_id, matches[best.worker_id])

    def _lacks_adapter(self, request: OwnedRequest) -> bool:
        return not any(ledger.has_adapter_of(request) for ledger in self._workers.values())

    def _note_missing(self, request: OwnedRequest) -> float:
        missing = self._missing_since
        digest = request.request.adapter_digest
        if digest not in missing and len(missing) >= MAX_MISSING:
            del missing[next(iter(missing))]
        return missing.setdefault(digest, self._registry.now)

    def _start(self, sequence: Sequence, worker_id: WorkerId, match: PrefixMatch) -> None:
        request = sequence.request
        ledger = self._workers[worker_id]
        sequence_id = SequenceId(self.next_sequence_id)
        self.next_sequence_id += 1
        attempt = sequence.next_attempt
        share = request.share
        rank = -2 * sequence.base_level - share.is_below
        if sequence.last_attempt is None:
            share.charge_input(sequence.num_tokens - match.num_cached)
        stay = ledger.start(sequence_id, sequence, match)
        self._registry.run(sequence, stay, attempt)
        copies = () if match.copy_from is None else ((match.copy_from, stay.block_ids[len(match.block_ids)]),)
        ledger.credit.admissions.append(
            Admission(
                sequence_id=sequence_id,
                request=request.request,
                choice=sequence.choice,
                attempt=attempt,
                block_ids=tuple(stay.block_ids),
                output=pack_ids(sequence.output),
                num_cached=match.num_cached,
                copies=copies,
                ack_subject=request.ack_subject,
                stream_sequence=request.stream_sequence,
                num_losses=request.num_losses,
                suspicion=request.suspicion,
                rank=rank,
            )
        )
        self.num_admissions += 1
        self.num_known_tokens += sequence.num_tokens
        self.num_cached_tokens += match.num_cached
        if request.request.num_choices > 1:
            self._registry.unpark(request)

    def _displace(self, sequence: Sequence) -> bool:
        """Takes others off a worker for a sequence that goes before them. Whether some were."""
        waiting = self._registry.waiting
        shares = self._registry.shares
        if sequence.request.is_suspect or not (
            shares.has_running_below(sequence.base_level) or sequence.request.share.is_below
        ):
            return False
        if waiting.reserved is not None and goes_before(waiting.reserved[0], sequence):
            return False
        room = find_room(sequence, self._workers)
        if room is None:
            return False
        # Blocks come back only when the worker confirms: nobody else is to have them then.
        waiting.reserved = (sequence, room.worker_id)
        for stay in room.stays:
            assert stay.sequence is not None, stay.sequence_id
            stay.sequence.num_displaced += 1
            self.num_displaced += 1
            stay.ledger.stop(stay, tell=True)
            self._registry.leave(stay.sequence)
        return bool(room.stays)

    def _reserve_for(self, sequence: Sequence) -> None:
        """Keeps the emptiest worker that could hold it for a sequence that was passed too often."""
        waiting = self._registry.waiting
        if sequence.num_bypassed < MAX_BYPASSED:
            return
        if waiting.reserved is not None and waiting.reserved[0] is sequence and waiting.reserved[1] in self._workers:
            return
        able = [
            (ledger.pool.num_free + ledger.pool.num_awaiting, worker_id)
            for worker_id, ledger in self._workers.items()
            if ledger.accepting and ledger.can_take(sequence.request)
        ]
        waiting.reserved = (sequence, max(able)[1]) if able else None


def _is_kept_from(sequence: Sequence, worker_id: WorkerId, reserved: tuple[Sequence, WorkerId] | None) -> bool:
    """The worker is reserved for somebody whom this one does not go before."""
    if reserved is None or reserved[1] != worker_id or reserved[0] is sequence:
        return False
    return not goes_before(sequence, reserved[0])
