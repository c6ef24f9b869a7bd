"""One leased worker as this scheduler talks to it within one epoch: adoption, numbering, heartbeats.

A link never repairs anything. When a number is missing, or the worker does not answer, it is `broken`, and its owner
takes a new epoch and makes a new link.
"""

from collections.abc import Callable, Iterator, Sequence

from headrace_scheduler.decisions import Credit
from headrace_shared import codec
from headrace_shared.errors import BusError
from headrace_shared.messages import (
    Admission,
    Adopt,
    DrainVerdict,
    Extension,
    Grant,
    Progress,
    SchedulerId,
    SequenceId,
    SequenceSnapshot,
    Snapshot,
    WorkerId,
)
from headrace_shared.subjects import grants_subject

HEARTBEAT_S = 0.4
"""Grants flow at least this often; the contract allows 0.5."""
ADOPTION_TIMEOUT_S = 2.0
GRANT_LAG_S = 2.0
ENVELOPE_BYTES = 1024
"""Room for a message's own fields around its items."""

Publish = Callable[[str, bytes], None]


class WorkerLink:
    """`publish` may raise a BusError: the link is broken then. `now` is monotonic time."""

    def __init__(
        self,
        worker_id: WorkerId,
        scheduler_id: SchedulerId,
        epoch: int,
        publish: Publish,
        max_payload: int,
        now: float,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.broken: str | None = None
        """Why a new epoch is needed."""
        self.is_active = False
        """The snapshot is complete: grants may flow."""
        self.active_since = now
        self.num_iterations = 0
        self.iterated_at = now
        """When `num_iterations` last rose."""
        self._publish = publish
        self._max_bytes = max_payload - ENVELOPE_BYTES
        self._parts: dict[int, Snapshot] = {}
        self._created_at = now
        self._granted_at = now
        self._grant_number = 0
        self._grant_seen = 0
        self._num_of_admissions = 0
        """Number of the last grant that admitted something."""
        self._seen_at = now
        """When the worker last kept up with our grants."""
        self._progress_number = 0
        self._send(codec.encode(Adopt(worker=worker_id, scheduler=scheduler_id, epoch=epoch)))

    @property
    def is_settled(self) -> bool:
        """The worker has confirmed every admission: nothing would be lost if somebody else adopted it now."""
        return self.is_active and self._grant_seen >= self._num_of_admissions

    def on_snapshot(self, snapshot: Snapshot, now: float) -> list[SequenceSnapshot] | None:
        """All sequences once all parts are here, and only once; None until then."""
        if self.is_active or snapshot.epoch != self.epoch:
            return None
        self._parts[snapshot.part] = snapshot
        if len(self._parts) < snapshot.num_parts:
            return None
        self.is_active = True
        self.active_since = now
        self._seen_at = now
        parts = [self._parts[part] for part in sorted(self._parts)]
        self._parts = {}
        return [sequence for part in parts for sequence in part.sequences]

    def on_progress(self, progress: Progress, now: float) -> bool:
        """Whether the core should apply it: it is of this epoch and the next in order."""
        if progress.epoch != self.epoch or self.broken is not None:
            return False
        if not self.is_active:
            self.broken = "a part of the snapshot is missing"
            return False
        if progress.number <= self._progress_number:
            return False
        if progress.number != self._progress_number + 1:
            self.broken = f"progress {self._progress_number + 1} is missing"
            return False
        if progress.resync:
            self.broken = "the worker misses a grant"
            return False
        self._progress_number = progress.number
        if progress.grant_seen >= self._grant_number or progress.grant_seen > self._grant_seen:
            self._seen_at = now
        self._grant_seen = progress.grant_seen
        if progress.num_iterations != self.num_iterations:
            self.num_iterations = progress.num_iterations
            self.iterated_at = now
        return True

    def grant(self, credit: Credit, now: float) -> None:
        """Sends credit, in as many grants as the broker's payload limit asks for."""
        for admissions, extensions, releases in split_credit(credit, self._max_bytes):
            self._grant(admissions, extensions, releases, now)

    def judge(self, *, is_granted: bool, has_others: bool) -> None:
        """Says whether the worker may leave."""
        if self.broken is None and self.is_active:
            verdict = DrainVerdict(
                worker=self.worker_id, epoch=self.epoch, is_granted=is_granted, has_others=has_others
            )
            self._send(codec.encode(verdict))

    def tick(self, now: float) -> None:
        """To be called at least every 100 ms."""
        if not self.is_active:
            if now - self._created_at > ADOPTION_TIMEOUT_S:
                self.broken = "no complete snapshot in time"
        elif self._grant_seen < self._grant_number and now - self._seen_at > GRANT_LAG_S:
            self.broken = f"grant {self._grant_seen + 1} is not applied"
        elif now - self._granted_at >= HEARTBEAT_S:
            self._grant((), (), (), now)

    def _grant(
        self,
        admissions: Sequence[Admission],
        extensions: Sequence[Extension],
        releases: Sequence[SequenceId],
        now: float,
    ) -> None:
        if self.broken is not None or not self.is_active:
            return
        if self._grant_seen == self._grant_number:
            self._seen_at = now
        self._grant_number += 1
        self._granted_at = now
        if admissions:
            self._num_of_admissions = self._grant_number
        grant = Grant(
            worker=self.worker_id,
            epoch=self.epoch,
            number=self._grant_number,
            progress_seen=self._progress_number,
            admissions=tuple(admissions),
            extensions=tuple(extensions),
            releases=tuple(releases),
        )
        self._send(codec.encode(grant))

    def _send(self, data: bytes) -> None:
        try:
            self._publish(grants_subject(self.worker_id), data)
        except BusError as error:
            self.broken = f"not sent: {error}"


Bodies = Iterator[tuple[list[Admission], list[Extension], list[SequenceId]]]


def split_credit(credit: Credit, max_bytes: int) -> Bodies:
    """Bodies of grants in order, each within `max_bytes` (an item that is larger alone stays alone)."""
    admissions: list[Admission] = []
    extensions: list[Extension] = []
    size = 0
    for admission in credit.admissions:
        item_bytes = admission_bytes(admission)
        if admissions and size + item_bytes > max_bytes:
            yield admissions, [], []
            admissions, size = [], 0
        admissions.append(admission)
        size += item_bytes
    for extension in credit.extensions:
        item_bytes = 16 + 5 * len(extension.block_ids)
        if size + item_bytes > max_bytes:
            yield admissions, extensions, []
            admissions, extensions, size = [], [], 0
        extensions.append(extension)
        size += item_bytes
    num_fit = max(0, max_bytes - size) // 9
    yield admissions, extensions, credit.releases[:num_fit]
    rest = credit.releases[num_fit:]
    step = max(1, max_bytes // 9)
    for start in range(0, len(rest), step):
        yield [], [], rest[start : start + step]


def admission_bytes(admission: Admission) -> int:
    """An upper bound of its encoded size."""
    request, sampling = admission.request, admission.request.sampling
    text = len(request.model) + len(request.tenant) + len(request.cache_salt) + len(admission.ack_subject)
    text += len(request.adapter) + len(request.adapter_digest) + len(sampling.grammar)
    text += sum(2 + len(key) + len(value) for key, value in request.trace.items())
    numbers = len(admission.block_ids) + 3 * len(admission.copies) + len(request.stop.stop_token_ids)
    numbers += len(sampling.logprob_token_ids) + sum(1 + len(word) for word in sampling.bad_words)
    return (
        2048
        + len(request.prompt)
        + len(admission.output)
        + len(sampling.allowed_token_ids)
        + 4 * text
        + 5 * numbers
        + 16 * len(sampling.logit_bias)
    )
