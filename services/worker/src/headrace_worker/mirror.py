"""All that the worker holds, as the I/O process knows it: built from the grants that went in and the results that came
out.

Answers an Adopt at once, whatever the engine is doing. Also remembers what of each sequence was published and reported,
so that a message that could not be sent is simply sent later, with more in it.
"""

from array import array
from collections.abc import Iterable

from msgspec.structs import replace

from headrace_shared import codec
from headrace_shared.messages import (
    Admission,
    BlockId,
    Extension,
    FinishReason,
    Grant,
    SequenceId,
    SequenceProgress,
    SequenceSnapshot,
    TokenFrame,
    TokenLogprobs,
)
from headrace_worker.iteration import SequenceResult

MAX_COALESCED = 4
"""Iterations in one progress, unless `is_report_urgent`. Few against the horizon of granted blocks."""
MAX_FRAME_TOKENS = 16_384
MAX_FRAME_LOGPROBS = 512
"""With log-probabilities a token takes a few hundred bytes."""
KEPT_LOOKS = 10
MAX_KEPT = 1024
"""Sequences that are over but kept for a while, in case the log has missed their last tokens."""


class MirrorSequence:
    __slots__ = (
        "admission",
        "block_ids",
        "embedding",
        "error",
        "finish",
        "first_index",
        "is_released",
        "logprobs",
        "most_tokens",
        "num_computed",
        "num_published",
        "num_reported",
        "num_scores_published",
        "scores",
        "tokens",
    )

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.block_ids: list[BlockId] = list(admission.block_ids)
        self.tokens: array[int] = array("I")
        """Sampled since the admission."""
        self.logprobs: list[TokenLogprobs] | None = None if admission.request.sampling.num_logprobs is None else []
        """As long as `tokens`, where they were asked for."""
        self.most_tokens = MAX_FRAME_TOKENS if self.logprobs is None else MAX_FRAME_LOGPROBS
        """Of a frame."""
        self.scores: list[TokenLogprobs] = []
        """Of the prompt's tokens but the first, where they were asked for."""
        self.num_scores_published = 0
        self.first_index = len(admission.output) // 4
        self.num_computed = admission.num_cached
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.embedding = b""
        self.is_released = False
        self.num_published = 0
        """Leading `tokens` that went to the router."""
        self.num_reported = 0
        """Leading `tokens` that went to the scheduler."""

    @property
    def is_running(self) -> bool:
        return self.finish is None and self.error is None and not self.is_released

    def next_frame(self) -> TokenFrame:
        """The first unpublished tokens: those of the prompt, if any, then those of the output. The caller says
        `mark_published` once they are sent."""
        if self.num_scores_published < len(self.scores):
            return self._next_scores()
        start = self.num_published
        end = start + self.most_tokens
        admission = self.admission
        request = admission.request
        return TokenFrame(
            request_id=request.request_id,
            choice=admission.choice,
            attempt=admission.attempt,
            index=self.first_index + start,
            tokens=tuple(self.tokens[start:end]),
            logprobs=() if self.logprobs is None else tuple(self.logprobs[start:end]),
            finish=self.finish if end >= len(self.tokens) else None,
            num_cached=min(admission.num_cached, len(request.prompt) // 4),
            embedding=self.embedding if end >= len(self.tokens) else b"",
        )

    def shorten(self, frame: TokenFrame) -> bool:
        """The frame was too large for the broker: the next ones are of half as many tokens. False if they cannot be."""
        half = len(frame.tokens) // 2
        self.most_tokens = max(1, half)
        return half > 0

    def mark_published(self, frame: TokenFrame) -> bool:
        """Whether that was all of it."""
        if frame.index < 0:
            self.num_scores_published += len(frame.tokens)
            return self.num_scores_published >= len(self.scores) and not self.tokens and self.finish is None
        self.num_published += len(frame.tokens)
        return self.num_published >= len(self.tokens)

    def take_in_output(self) -> None:
        """What earlier attempts had generated is to be sent too. Nobody has its log-probabilities any more: where they
        are wanted, nothing changes."""
        if self.logprobs is None:
            self.tokens = codec.unpack_ids(self.admission.output) + self.tokens
            self.first_index = 0

    def unpublish(self) -> bool:
        """All of it is to be sent once more. Whether there is anything."""
        self.num_published = self.num_scores_published = 0
        return bool(self.tokens or self.scores) or self.finish is not None

    def _next_scores(self) -> TokenFrame:
        start = self.num_scores_published
        scores = self.scores[start : start + min(self.most_tokens, MAX_FRAME_LOGPROBS)]
        admission = self.admission
        request = admission.request
        num_prompt = len(request.prompt) // 4
        return TokenFrame(
            request_id=request.request_id,
            choice=admission.choice,
            attempt=admission.attempt,
            index=1 + start - num_prompt,
            tokens=tuple(codec.unpack_ids(request.prompt[4 * (1 + start) : 4 * (1 + start + len(scores))])),
            logprobs=tuple(scores),
            num_cached=min(admission.num_cached, num_prompt),
        )


class Mirror:
    """Belongs to the I/O process's event loop."""

    def __init__(self, block_size: int, *, keeps_finished: bool = False) -> None:
        """`keeps_finished`: what is over is kept for KEPT_LOOKS calls of `on_log_seen`."""
        self._block_size = block_size
        self._keeps_finished = keeps_finished
        self._kept: dict[SequenceId, tuple[MirrorSequence, int]] = {}
        """Sequences that are over, with the look after which they were."""
        self._num_looks = 0
        self._sequences: dict[SequenceId, MirrorSequence] = {}
        self._unpublished: dict[SequenceId, MirrorSequence] = {}
        self._unreported: dict[SequenceId, MirrorSequence] = {}
        self._newly_released: list[SequenceId] = []
        self._told: dict[SequenceId, int] = {}
        """Released sequences -> number of the progress (0: the snapshot) that told of it."""
        self._is_urgent = False

    @property
    def num_sequences(self) -> int:
        """Those that hold blocks."""
        return sum(1 for sequence in self._sequences.values() if not sequence.is_released)

    @property
    def num_blocks_held(self) -> int:
        """Distinct blocks; some are shared."""
        held: set[BlockId] = set()
        for sequence in self._sequences.values():
            if not sequence.is_released:
                held.update(sequence.block_ids)
        return len(held)

    @property
    def num_stalled(self) -> int:
        """Sequences that have no block for their next token."""
        return sum(1 for sequence in self._sequences.values() if sequence.is_running and not self._can_run(sequence))

    @property
    def can_run(self) -> bool:
        """The engine has something to compute."""
        return any(sequence.is_running and self._can_run(sequence) for sequence in self._sequences.values())

    def num_tokens_of(self, sequence_id: SequenceId) -> int:
        """Sampled since the admission."""
        sequence = self._sequences.get(sequence_id)
        return len(sequence.tokens) if sequence is not None else 0

    def drop_all(self) -> list[MirrorSequence]:
        """What routers had been told, or were to be, of at most MAX_KEPT sequences: for a log that has lost it all."""
        dropped = list(self._sequences.values())[:MAX_KEPT]
        self.clear()
        for sequence in dropped:
            sequence.take_in_output()
        return [sequence for sequence in dropped if sequence.unpublish()]

    def clear(self) -> None:
        self._sequences.clear()
        self._unpublished.clear()
        self._unreported.clear()
        self._newly_released.clear()
        self._told.clear()
        self._kept.clear()

    def apply_grant(self, grant: Grant) -> None:
        """Takes in what a grant admits and extends. Releases count only once the engine confirms them."""
        for admission in grant.admissions:
            if admission.sequence_id not in self._sequences:
                self._sequences[admission.sequence_id] = MirrorSequence(admission)
        for extension in grant.extensions:
            self._extend(extension)
        for sequence_id in [key for key, number in self._told.items() if number <= grant.progress_seen]:
            if sequence_id not in self._unpublished:
                del self._told[sequence_id]
                self._keep(sequence_id, self._sequences.pop(sequence_id))

    def apply_rows(self, rows: Iterable[SequenceResult], released: Iterable[SequenceId]) -> int:
        """Takes in one iteration's results; returns the number of new tokens. Rows of sequences that were dropped
        meanwhile mean nothing."""
        num_tokens = 0
        for row in rows:
            sequence = self._sequences.get(row.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed = row.num_computed
            self._unreported[row.sequence_id] = sequence
            if row.token is not None:
                sequence.tokens.append(row.token)
                num_tokens += 1
                if sequence.logprobs is not None:
                    sequence.logprobs.append(row.logprobs if row.logprobs is not None else TokenLogprobs(0.0, ()))
            if row.embedding is not None:
                sequence.embedding = row.embedding
            if row.finish is not None:
                sequence.finish = row.finish
            if row.error is not None:
                sequence.error = row.error
            sequence.scores += row.scores
            if row.token is not None or row.finish is not None or row.scores:
                self._unpublished[row.sequence_id] = sequence
                self._is_urgent |= row.finish is not None or (row.token is not None and len(sequence.tokens) == 1)
            elif row.error is not None:
                self._is_urgent = True
        for sequence_id in released:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and not sequence.is_released:
                sequence.is_released = True
                self._newly_released.append(sequence_id)
                self._is_urgent = True
        return num_tokens

    # Token frames.

    def unpublished(self) -> list[MirrorSequence]:
        """Those with nothing published yet come first: their users still wait for a first token, and each frame ahead
        of it costs broker and router time."""
        return sorted(self._unpublished.values(), key=_has_begun)

    @property
    def has_unpublished(self) -> bool:
        return bool(self._unpublished)

    def mark_published(self, sequence: MirrorSequence, frame: TokenFrame) -> bool:
        """Whether that was all of it."""
        if not sequence.mark_published(frame):
            return False
        self._unpublished.pop(sequence.admission.sequence_id, None)
        return True

    def give_up(self, sequence: MirrorSequence, problem: str) -> None:
        """What is left of it cannot be told to anybody."""
        sequence_id = sequence.admission.sequence_id
        sequence.error = problem
        self._unpublished.pop(sequence_id, None)
        if sequence_id in self._sequences:  # else the scheduler knows that it is over
            self._unreported[sequence_id] = sequence
            self._is_urgent = True

    def publish_again(self) -> None:
        """What was sent last may be lost, so every sequence's tokens are to be sent once more."""
        kept = {sequence_id: sequence for sequence_id, (sequence, _) in self._kept.items()}
        for sequence_id, sequence in (kept | self._sequences).items():
            if sequence.unpublish():
                self._unpublished[sequence_id] = sequence

    def on_log_seen(self) -> None:
        """The log is there and takes what is published."""
        self._num_looks += 1
        for sequence_id in [key for key, (_, look) in self._kept.items() if look < self._num_looks - KEPT_LOOKS]:
            del self._kept[sequence_id]

    def _keep(self, sequence_id: SequenceId, sequence: MirrorSequence) -> None:
        if self._keeps_finished:
            self._kept[sequence_id] = (sequence, self._num_looks)
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]

    # Progress.

    @property
    def has_report(self) -> bool:
        return bool(self._unreported or self._newly_released)

    @property
    def is_report_urgent(self) -> bool:
        """Something waits for this report: blocks for others, or choices for the prompt that they share."""
        return self._is_urgent

    def report(self, max_bytes: int) -> tuple[list[SequenceProgress], list[SequenceId]]:
        """What is unreported, as much as fits; the rest is for the next call. The caller says `mark_reported` once it
        is sent."""
        rows: list[SequenceProgress] = []
        size = 0
        for sequence_id, sequence in self._unreported.items():
            tokens = sequence.tokens[sequence.num_reported :].tolist()
            size += 32 + 5 * len(tokens) + (len(sequence.error) * 4 if sequence.error is not None else 0)
            if rows and size > max_bytes:
                return rows, []
            rows.append(
                SequenceProgress(sequence_id, sequence.num_computed, tuple(tokens), sequence.finish, sequence.error)
            )
        return rows, self._newly_released[: max(0, max_bytes - size) // 9]

    def mark_reported(self, rows: list[SequenceProgress], released: list[SequenceId], number: int) -> None:
        for row in rows:
            sequence = self._unreported.pop(row.sequence_id)
            sequence.num_reported += len(row.tokens)
        for sequence_id in released:
            self._told[sequence_id] = number
        del self._newly_released[: len(released)]
        self._is_urgent = False

    # Snapshot.

    def snapshot(self, max_bytes: int) -> list[tuple[SequenceSnapshot, ...]]:
        """All sequences in parts of at most `max_bytes` when encoded; at least one part. From now on everything counts
        as reported, by progress number 0. Call `drop_larger_than` before: a sequence is never split."""
        parts: list[tuple[SequenceSnapshot, ...]] = []
        part: list[SequenceSnapshot] = []
        size = 0
        for sequence in self._sequences.values():
            entry = _snapshot_of(sequence)
            entry_size = len(codec.encode(entry))
            if part and size + entry_size > max_bytes:
                parts.append(tuple(part))
                part, size = [], 0
            part.append(entry)
            size += entry_size
            sequence.num_reported = len(sequence.tokens)
            if sequence.is_released:
                self._told[sequence.admission.sequence_id] = 0
        self._is_urgent = False
        self._unreported.clear()
        self._newly_released.clear()
        return [*parts, tuple(part)]

    def drop_larger_than(self, max_bytes: int) -> list[SequenceId]:
        """Forgets sequences that no message can describe; the engine is to release them, and the scheduler places them
        anew."""
        dropped = [
            sequence_id
            for sequence_id, sequence in self._sequences.items()
            if 4 * len(sequence.tokens) + len(sequence.admission.request.prompt) > max_bytes // 2
            and len(codec.encode(_snapshot_of(sequence))) > max_bytes
        ]
        for sequence_id in dropped:
            for known in (self._sequences, self._unpublished, self._unreported, self._told):
                known.pop(sequence_id, None)
        self._newly_released = [key for key in self._newly_released if key in self._sequences]
        return dropped

    def _extend(self, extension: Extension) -> None:
        sequence = self._sequences.get(extension.sequence_id)
        if sequence is not None and not sequence.is_released:
            sequence.block_ids.extend(extension.block_ids)

    def _can_run(self, sequence: MirrorSequence) -> bool:
        return sequence.num_computed < len(sequence.block_ids) * self._block_size


def _has_begun(sequence: MirrorSequence) -> bool:
    return sequence.num_published > 0


def _snapshot_of(sequence: MirrorSequence) -> SequenceSnapshot:
    return SequenceSnapshot(
        admission=replace(sequence.admission, block_ids=tuple(sequence.block_ids), copies=()),
        tokens=codec.pack_ids(sequence.tokens),
        num_computed=sequence.num_computed,
        finish=sequence.finish,
        error=sequence.error,
        released=sequence.is_released,
    )
