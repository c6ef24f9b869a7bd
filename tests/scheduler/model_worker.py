"""A worker's protocol, simulated: grants in, iterations that read and write real block contents, progress out.

Each slot of a block remembers which tokens its keys and values were computed from. Every computed position checks all
positions that it attends to, so a block that was shared too early, given away too early or written by two sequences is
found the moment it is read or written.
"""

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from headrace_scheduler.decisions import WorkerFacts
from headrace_scheduler.ledger import most_admitted
from headrace_shared.codec import pack_ids, unpack_ids
from headrace_shared.messages import (
    Admission,
    BlockId,
    FinishReason,
    Grant,
    Progress,
    SequenceId,
    SequenceProgress,
    SequenceSnapshot,
    WorkerId,
)
from tests.scheduler import oracle

Publish = Callable[[Admission, int, list[int], FinishReason | None], None]
"""(admission, index, tokens, finish): a token frame."""


class _Sequence:
    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.tokens = [*unpack_ids(admission.request.prompt), *unpack_ids(admission.output)]
        self.num_prompt = len(admission.request.prompt) // 4
        self.num_known = len(self.tokens)
        """At the admission."""
        self.block_ids = list(admission.block_ids)
        self.num_computed = admission.num_cached
        self.num_submitted = admission.num_cached
        self.num_sampling = 0
        self.num_in_flight = 0
        self.num_reported = 0
        self.finish: FinishReason | None = None
        self.stopped = False
        self.released = False

    @property
    def is_over(self) -> bool:
        return self.stopped or self.finish is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


class ModelWorker:
    """`depth`: iterations on the device at once. They run, with copies between them, when the first is collected."""

    def __init__(self, worker_id: WorkerId, facts: WorkerFacts, depth: int, publish: Publish) -> None:
        self.worker_id = worker_id
        self.facts = facts
        self.epoch = 0
        self.resync = False
        self._depth = depth
        self._publish = publish
        self._blocks: list[list[int | None]] = [[None] * facts.block_size for _ in range(facts.num_blocks)]
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._device: deque[list[tuple[_Sequence, int, int]] | tuple[BlockId, BlockId]] = deque()
        """Iterations (sequence, start, stop) and copies, in order of submission."""
        self._unreported: dict[SequenceId, _Sequence] = {}
        self._newly_released: list[SequenceId] = []
        self._told: dict[SequenceId, int] = {}
        self._grant_seen = 0
        self._progress_number = 0

    @property
    def holds_nothing(self) -> bool:
        return all(sequence.released for sequence in self._sequences.values())

    def running_outputs(self) -> list[tuple[str, int]]:
        """Request and length of the answer, of each sequence that runs."""
        return [
            (sequence.admission.request.request_id, sequence.num_output)
            for sequence in self._sequences.values()
            if not sequence.is_over
        ]

    def drop_all(self) -> None:
        """Cut off from the broker for too long."""
        for sequence in self._sequences.values():
            sequence.stopped = True
        self._sequences.clear()
        self._unreported.clear()
        self._newly_released.clear()
        self._told.clear()

    def adopt(self, epoch: int) -> list[SequenceSnapshot]:
        assert epoch > self.epoch
        self.epoch, self.resync, self._grant_seen, self._progress_number = epoch, False, 0, 0
        self._unreported.clear()
        self._newly_released.clear()
        snapshot = []
        for sequence_id, sequence in self._sequences.items():
            sequence.num_reported = len(sequence.tokens) - sequence.num_known
            if sequence.released:
                self._told[sequence_id] = 0
            admission = replace(sequence.admission, block_ids=tuple(sequence.block_ids), copies=())
            snapshot.append(
                SequenceSnapshot(
                    admission=admission,
                    tokens=pack_ids(sequence.tokens[sequence.num_known :]),
                    num_computed=sequence.num_computed,
                    finish=sequence.finish,
                    released=sequence.released,
                )
            )
        return snapshot

    def apply(self, grant: Grant) -> None:
        if grant.epoch != self.epoch or self.resync:
            return
        if grant.number != self._grant_seen + 1:
            self.resync = True
            return
        self._grant_seen = grant.number
        for sequence_id in [key for key, number in self._told.items() if number <= grant.progress_seen]:
            del self._told[sequence_id]
            del self._sequences[sequence_id]
        for admission in grant.admissions:
            self._admit(admission)
        for extension in grant.extensions:
            extended = self._sequences.get(extension.sequence_id)
            if extended is not None and not extended.released:
                extended.block_ids.extend(extension.block_ids)
        for sequence_id in grant.releases:
            stopped = self._sequences.get(sequence_id)
            if stopped is not None and not stopped.is_over:
                stopped.stopped = True
                self._retire(stopped)
        num_running = sum(not sequence.is_over for sequence in self._sequences.values())
        assert num_running <= most_admitted(self.facts.max_sequences), num_running

    def iterate(self) -> bool:
        """Submits up to the device's depth and collects the oldest iteration. False if there is nothing to compute."""
        while self._num_iterations() < self._depth and (parts := self._compose()):
            for sequence, _, stop in parts:
                sequence.num_submitted = stop
                sequence.num_in_flight += 1
                sequence.num_sampling += stop == len(sequence.tokens) + sequence.num_sampling
            self._device.append(parts)
        while self._device:
            work = self._device.popleft()
            if isinstance(work, list):
                self._run(work)
                return True
            self._blocks[work[1]] = list(self._blocks[work[0]])
        return False

    def progress(self) -> Progress | None:
        """What is unreported; None if nothing is."""
        if not self._unreported and not self._newly_released and not self.resync:
            return None
        self._progress_number += 1
        rows = []
        for sequence_id, sequence in self._unreported.items():
            tokens = sequence.tokens[sequence.num_known + sequence.num_reported :]
            sequence.num_reported += len(tokens)
            rows.append(SequenceProgress(sequence_id, sequence.num_computed, tuple(tokens), sequence.finish))
        for sequence_id in self._newly_released:
            self._told[sequence_id] = self._progress_number
        progress = Progress(
            worker=self.worker_id,
            epoch=self.epoch,
            number=self._progress_number,
            grant_seen=self._grant_seen,
            resync=self.resync,
            sequences=tuple(rows),
            released=tuple(self._newly_released),
        )
        self._unreported.clear()
        self._newly_released.clear()
        return progress

    def _admit(self, admission: Admission) -> None:
        assert admission.sequence_id not in self._sequences, admission.sequence_id
        sequence = _Sequence(admission)
        assert 0 <= admission.num_cached < len(sequence.tokens), admission
        assert len(set(sequence.block_ids)) == len(sequence.block_ids), admission
        assert len(sequence.block_ids) * self.facts.block_size >= len(sequence.tokens), admission
        self._sequences[admission.sequence_id] = sequence
        self._device.extend(admission.copies)
        if admission.output and sequence.num_output >= oracle.length(admission.request, admission.choice):
            # An earlier attempt had got to the end, and nobody heard of it.
            self._finish(sequence)
            self._publish(admission, sequence.num_output, [], sequence.finish)
            self._retire(sequence)

    def _num_iterations(self) -> int:
        return sum(isinstance(work, list) for work in self._device)

    def _compose(self) -> list[tuple[_Sequence, int, int]]:
        budget = self.facts.tokens_per_iteration
        parts = []
        for sequence in self._sequences.values():
            expected = len(sequence.tokens) + sequence.num_sampling
            limit = sequence.admission.request.stop.max_tokens
            if sequence.is_over or sequence.num_output + sequence.num_sampling >= limit:
                continue
            capacity = len(sequence.block_ids) * self.facts.block_size
            stop = min(expected, sequence.num_submitted + budget, capacity)
            if stop > sequence.num_submitted:
                parts.append((sequence, sequence.num_submitted, stop))
                budget -= stop - sequence.num_submitted
        return parts

    def _run(self, parts: list[tuple[_Sequence, int, int]]) -> None:
        for sequence, start, stop in parts:
            identity = self._compute(sequence, start, stop)
            samples = stop == len(sequence.tokens)
            sequence.num_in_flight -= 1
            sequence.num_sampling -= samples
            if not sequence.is_over:
                self._advance(sequence, stop, identity if samples else None)
            if sequence.is_over:
                self._retire(sequence)

    def _compute(self, sequence: _Sequence, start: int, stop: int) -> int:
        """Reads every earlier position, writes [start, stop). Returns the last position's identity."""
        size = self.facts.block_size
        where = f"sequence {sequence.admission.sequence_id}"
        # What a dropped sequence still has in flight is overwritten: the device works in order.
        is_held = self._sequences.get(sequence.admission.sequence_id) is sequence
        for other in self._sequences.values():
            if is_held and other is not sequence and not other.released:
                written = set(sequence.block_ids[start // size : (stop - 1) // size + 1])
                assert not written.intersection(other.block_ids), (where, other.admission.sequence_id, written)
        identity = oracle.root(sequence.admission.request)
        for position in range(stop):
            # A sequence that was stopped in flight computes on with whatever the device sampled.
            token = sequence.tokens[position] if position < len(sequence.tokens) else -1
            identity = oracle.extend(identity, token)
            block = self._blocks[sequence.block_ids[position // size]]
            if position >= start:
                block[position % size] = identity
            assert block[position % size] == identity, (where, position, start, stop, sequence.block_ids)
        return identity

    def _advance(self, sequence: _Sequence, num_computed: int, identity: int | None) -> None:
        admission = sequence.admission
        sequence.num_computed = num_computed
        self._unreported[admission.sequence_id] = sequence
        if identity is None:
            return
        index = sequence.num_output
        sequence.tokens.append(oracle.sample(admission.request, admission.choice, index, identity))
        if sequence.num_output >= oracle.length(admission.request, admission.choice):
            self._finish(sequence)
        self._publish(admission, index, [sequence.tokens[-1]], sequence.finish)

    def _finish(self, sequence: _Sequence) -> None:
        sequence.finish = oracle.finish(sequence.admission.request, sequence.admission.choice)
        self._unreported[sequence.admission.sequence_id] = sequence

    def _retire(self, sequence: _Sequence) -> None:
        sequence_id = sequence.admission.sequence_id
        if sequence.num_in_flight == 0 and not sequence.released and self._sequences.get(sequence_id) is sequence:
            sequence.released = True
            self._newly_released.append(sequence_id)
