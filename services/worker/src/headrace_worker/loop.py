"""The iteration loop: compose, submit, collect, retire. Pure of torch, sockets and threads; it drives an `Engine`.

What an iteration consists of is `composer.py`'s business.

With an engine that looks ahead, iteration i + 1 is submitted before iteration i is collected, so that the device never
waits for Python. Then a sequence may turn out to be over while its next token is in flight: that token is discarded,
and the sequence's blocks are confirmed free only when no iteration in flight contains it.

With an engine that is a pipeline, as many iterations are in flight as it has stages. A sequence whose next token is
being sampled waits for it, so the iterations in flight decode different sequences, about equally many each; the chunks
of one prompt may follow each other.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from headrace_shared.messages import Admission, Extension, SequenceId, TokenLogprobs
from headrace_worker.composer import Composer, Part
from headrace_worker.iteration import AdapterSet, Engine, SampledToken, SequenceResult, SequenceSlice
from headrace_worker.pacing import Pacer
from headrace_worker.sequences import LoopSequence, admission_problem, are_blocks


class StepResult(NamedTuple):
    """What one call of `step` brought about; sequences that failed without an iteration are in it too."""

    num_iterations: int
    """Collected since the start."""
    sequences: list[SequenceResult]
    released: list[SequenceId]
    num_prefill_tokens: int
    elapsed_s: float


class _Iteration(NamedTuple):
    parts: list[Part]
    num_prefill_tokens: int
    num_decoding: int
    """Sequences with one token: those that decode, and a prompt's last or only one, which costs as much."""
    num_chunk_tokens: int
    """Of the other sequences."""


class IterationLoop:
    """Not thread-safe. Exceptions of the engine pass through: it is beyond repair then, and so is this loop."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.perf_counter, decode_slowdown: float = 0.0
    ) -> None:
        """`decode_slowdown` bounds what a long prompt costs those who decode (`pacing.py`); 0: nothing does."""
        self._engine = engine
        self._pacer = Pacer(decode_slowdown, engine.facts.tokens_per_iteration)
        self._facts = engine.facts
        self._is_pipeline = self._facts.num_stages > 1
        self._depth = self._facts.num_stages if self._is_pipeline else 2 if engine.looks_ahead else 1
        # A draft is a guess about a token that is known, so none of it may be in flight.
        max_drafts = 0 if self._depth > 1 else self._facts.max_drafts
        self._composer = Composer(self._facts, self._pacer, max_drafts)
        self._clock = clock
        self._sequences: dict[SequenceId, LoopSequence] = {}
        """In admission order."""
        self._in_flight: deque[_Iteration] = deque()
        self._num_iterations = 0
        self._busy_since: float | None = None
        self._failed: list[SequenceResult] = []
        self._released: list[SequenceId] = []

    @property
    def adapters(self) -> AdapterSet | None:
        """Of its engine."""
        return self._engine.adapters

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def admit(self, admission: Admission) -> None:
        """Takes a sequence in. One that cannot run here is reported as failed and released by the next step."""
        if admission.sequence_id in self._sequences:
            return
        problem = admission_problem(admission, self._facts) or self._adapter_problem(admission)
        if problem is not None:
            self._failed.append(SequenceResult(admission.sequence_id, 0, error=problem))
            self._released.append(admission.sequence_id)
            return
        sequence = LoopSequence(admission, self._facts.context)
        if sequence.is_over:
            self._failed.append(SequenceResult(admission.sequence_id, admission.num_cached, finish=sequence.finish))
            self._released.append(admission.sequence_id)
            return
        self._engine.add(admission)
        self._sequences[admission.sequence_id] = sequence

    def _adapter_problem(self, admission: Admission) -> str | None:
        digest, adapters = admission.request.adapter_digest, self._engine.adapters
        if not digest or (adapters is not None and digest in adapters):
            return None
        return f"The adapter '{admission.request.adapter}' is not loaded here."

    def extend(self, extension: Extension) -> None:
        sequence = self._sequences.get(extension.sequence_id)
        if sequence is None or sequence.is_over:
            return
        if are_blocks(extension.block_ids, self._facts):
            sequence.block_ids.extend(extension.block_ids)
        else:
            sequence.error = "The granted cache blocks do not exist."
            self._failed.append(SequenceResult(sequence.sequence_id, sequence.num_computed, error=sequence.error))
            self._retire(sequence)

    def release(self, sequence_id: SequenceId) -> None:
        """Stops a sequence. An unknown one has just finished."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and not sequence.is_over:
            sequence.stopped = True
            self._retire(sequence)

    def reset(self) -> None:
        """Drops every sequence without a report, after waiting for the iterations in flight: ids may be used again."""
        while self._in_flight:
            self._in_flight.popleft()
            self._engine.collect()
            self._num_iterations += 1
        for sequence_id in self._sequences:
            self._engine.remove(sequence_id)
        self._sequences.clear()
        self._failed.clear()
        self._released.clear()

    def rest(self) -> None:
        """As `reset`; and the engine gives up what memory only sequences need."""
        self.reset()
        self._engine.rest()

    def step(self) -> StepResult | None:
        """Keeps the engine supplied and collects the oldest iteration. None: nothing can run and nothing happened."""
        while len(self._in_flight) < self._depth and self._submit():
            pass
        if self._in_flight:
            return self._collect()
        if self._await_grammar():
            return self._collect() if self._submit() else self._result([], 0, 0.0)
        self._busy_since = None
        if not self._failed and not self._released:
            return None
        return self._result([], 0, 0.0)

    def _submit(self) -> bool:
        parts = self._composer.compose(self._able(), self._places())
        if not parts:
            return False
        if self._busy_since is None:
            self._busy_since = self._clock()
        self._engine.submit([part for _, part in parts])
        num_prefill_tokens = num_decoding = num_chunk_tokens = 0
        for sequence, part in parts:
            sequence.submitted(part)
            if part.start < sequence.num_admitted:
                num_prefill_tokens += part.num_tokens
            if part.num_tokens - part.num_drafts == 1:
                num_decoding += 1
            else:
                num_chunk_tokens += part.num_tokens
        self._in_flight.append(_Iteration(parts, num_prefill_tokens, num_decoding, num_chunk_tokens))
        return True

    def _able(self) -> Iterator[LoopSequence]:
        """Those that may take part in the next iteration."""
        for sequence in self._sequences.values():
            if not (sequence.is_over or (self._is_pipeline and sequence.num_sampling) or self._is_held_up(sequence)):
                yield sequence

    def _is_held_up(self, sequence: LoopSequence) -> bool:
        return sequence.has_grammar and (
            sequence.num_sampling > 0 or not self._engine.is_ready(sequence.sequence_id, wait=False)
        )

    def _await_grammar(self) -> bool:
        """With nothing else to do, for some milliseconds. False: that is not what is missing."""
        for sequence in self._sequences.values():
            if sequence.has_grammar and not sequence.is_over and self._is_held_up(sequence):
                self._engine.is_ready(sequence.sequence_id, wait=True)
                return True
        return False

    def _places(self) -> int:
        """Most sequences in the next iteration. Were all in one, only one stage of a pipeline would work at a time."""
        if not self._is_pipeline:
            return self._facts.max_sequences
        num_running = sum(
            not sequence.is_over
            and (sequence.num_in_flight > 0 or sequence.next_slice(self._facts.block_size, 1) is not None)
            for sequence in self._sequences.values()
        )
        return min(self._facts.max_sequences, -(-num_running // self._facts.num_stages))

    def _collect(self) -> StepResult:
        sampled = self._engine.collect()
        iteration = self._in_flight.popleft()
        self._num_iterations += 1
        results: list[SequenceResult] = []
        position = 0
        for sequence, part in iteration.parts:
            sequence.num_in_flight -= 1
            items = sampled[position : position + part.num_rows]
            position += part.num_rows
            if len(items) != part.num_rows:
                raise RuntimeError(f"the engine gave {len(sampled)} tokens, which is too few")
            sequence.num_sampling -= part.samples
            if not sequence.is_over:
                num_targets = len(part.targets)
                results += self._advance(sequence, part, items[:num_targets], items[num_targets:])
            if sequence.is_over:
                self._retire(sequence)
        now = self._clock()
        elapsed_s = now - (self._busy_since if self._busy_since is not None else now)
        self._busy_since = now
        self._pacer.observe(iteration.num_decoding, iteration.num_chunk_tokens, elapsed_s)
        return self._result(results, iteration.num_prefill_tokens, elapsed_s)

    def _advance(
        self, sequence: LoopSequence, part: SequenceSlice, scored: list[SampledToken], sampled: list[SampledToken]
    ) -> list[SequenceResult]:
        """One result for each token that is kept: a draft counts if it is what was sampled in its place."""
        sequence.computed(part.start + part.num_tokens - part.num_drafts)
        sequence.error = next((item.error for item in scored if item.error is not None), None)
        scores = tuple(item.logprobs for item in scored if item.logprobs is not None)
        if not sampled or sequence.is_over:
            return [SequenceResult(sequence.sequence_id, sequence.num_computed, error=sequence.error, scores=scores)]
        results = [self._keep(sequence, sampled[0], scores)]
        drafts = (part.token_ids or ())[part.num_tokens - part.num_drafts :]
        for draft, before, item in zip(drafts, sampled, sampled[1:], strict=False):
            if sequence.is_over or draft != before.token:
                break
            sequence.computed(sequence.num_computed + 1)
            results.append(self._keep(sequence, item))
        return results

    def _keep(
        self, sequence: LoopSequence, sampled: SampledToken, scores: tuple[TokenLogprobs, ...] = ()
    ) -> SequenceResult:
        error = sampled.error
        if error is None and not 0 <= sampled.token < self._facts.card.vocab_size:
            error = "The model gave a token outside its vocabulary."
        if error is not None:
            sequence.error = error
            return SequenceResult(sequence.sequence_id, sequence.num_computed, error=error, scores=scores)
        sequence.sampled(sampled.token)
        return SequenceResult(
            sequence.sequence_id,
            sequence.num_computed,
            sampled.token,
            sequence.finish,
            None,
            sampled.logprobs,
            scores,
            sampled.embedding,
        )

    def _retire(self, sequence: LoopSequence) -> None:
        """Confirms that a sequence's blocks are free, once nothing in flight can write them."""
        if sequence.num_in_flight or sequence.sequence_id not in self._sequences:
            return
        del self._sequences[sequence.sequence_id]
        self._engine.remove(sequence.sequence_id)
        self._released.append(sequence.sequence_id)

    def _result(self, results: list[SequenceResult], num_prefill_tokens: int, elapsed_s: float) -> StepResult:
        result = StepResult(self._num_iterations, self._failed + results, self._released, num_prefill_tokens, elapsed_s)
        self._failed = []
        self._released = []
        return result
