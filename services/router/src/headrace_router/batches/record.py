"""A batch, its states, and how it gets from one to the next. Pure: values in, values out.

    validating ─> in_progress ─> finalizing ─> completed | expired
        │              │              │
        ├─> failed     ├─> failed     ├─> failed
        └──────────────┴──> cancelling ─> cancelled

A batch that nobody has begun to check yet is `validating` too. What a batch ends as is decided when its files are
begun: `expired` is a completed batch whose time was up.
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

WINDOW = "24h"
MAX_ERRORS = 50
"""Of bad lines; further ones are only counted."""


class BatchState(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


TRANSITIONS: dict[BatchState, frozenset[BatchState]] = {
    BatchState.VALIDATING: frozenset(
        {BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING, BatchState.FAILED}
    ),
    BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING, BatchState.FAILED}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED, BatchState.FAILED}),
    BatchState.CANCELLING: frozenset({BatchState.CANCELLED, BatchState.FAILED}),
    BatchState.COMPLETED: frozenset(),
    BatchState.EXPIRED: frozenset(),
    BatchState.CANCELLED: frozenset(),
    BatchState.FAILED: frozenset(),
}
"""`validating` to `finalizing`: its time was up before it was begun."""


class IllegalTransition(Exception):
    """Nothing has changed."""


class BatchError(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None
    """From 1."""
    param: str | None = None


class BatchRecord(Struct, frozen=True, tag=True, kw_only=True):
    batch_id: str
    owner: str
    """`Identity.owner`."""
    key_id: str
    """Of the API key that made it, as whom its lines run; empty: none."""
    endpoint: str
    input_file_id: str
    created_at: float
    """All times in seconds since the epoch. Those of the same second have an order too."""
    expires_at: int
    """End of the window."""
    metadata: dict[str, str] | None = None
    output_life_s: int
    """Of the files with its results."""
    state: BatchState = BatchState.VALIDATING
    is_late: bool = False
    """Its window ended before its lines were done."""
    epoch: int = 0
    """Of the lease of whoever works on it: nobody with a lower one may change it."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    output_file_id: str = ""
    error_file_id: str = ""
    started_at: int = 0
    """Somebody has begun to check it."""
    in_progress_at: int = 0
    finalizing_at: int = 0
    cancelling_at: int = 0
    completed_at: int = 0
    expired_at: int = 0
    cancelled_at: int = 0
    failed_at: int = 0

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]


def move(record: BatchRecord, state: BatchState, now: float) -> BatchRecord:
    """Raises IllegalTransition."""
    if state not in TRANSITIONS[record.state]:
        raise IllegalTransition(f"{record.state} -> {state}")
    return replace(record, state=state, **{f"{state.value}_at": int(now)})


def taken(record: BatchRecord, epoch: int, now: float) -> BatchRecord:
    """By the holder of the lease."""
    if epoch <= record.epoch or record.is_over:
        raise IllegalTransition(f"epoch {record.epoch} -> {epoch} of a {record.state} batch")
    return replace(record, epoch=epoch, started_at=record.started_at or int(now))


def checked(record: BatchRecord, total: int, now: float) -> BatchRecord:
    """All lines are good."""
    return replace(move(record, BatchState.IN_PROGRESS, now), total=total)


def rejected(record: BatchRecord, errors: tuple[BatchError, ...], now: float) -> BatchRecord:
    return replace(move(record, BatchState.FAILED, now), errors=errors[:MAX_ERRORS])


def named(record: BatchRecord, output_file_id: str, error_file_id: str) -> BatchRecord:
    """Its files are being written, under these ids."""
    return replace(record, output_file_id=output_file_id, error_file_id=error_file_id)


def broken(
    record: BatchRecord, error: BatchError, completed: int, failed: int, files: tuple[str, str], now: float
) -> BatchRecord:
    """It cannot go on. The lines that were done are in its files."""
    return replace(named(rejected(record, (error,), now), *files), completed=completed, failed=failed)


def counted(record: BatchRecord, completed: int, failed: int) -> BatchRecord:
    """So many lines are done. Counts never fall: what is told may be late."""
    return replace(record, completed=max(record.completed, completed), failed=max(record.failed, failed))


def cancelled(record: BatchRecord, now: float) -> BatchRecord:
    """Somebody wants it to end. Raises IllegalTransition if it has ended, or is about to."""
    return move(record, BatchState.CANCELLING, now)


def finalized(
    record: BatchRecord, output_file_id: str, error_file_id: str, now: float, *, is_late: bool
) -> BatchRecord:
    """Its files are being written, under these ids; perhaps not for the first time. `is_late`: its window ended before
    its lines were done."""
    record = named(record, output_file_id, error_file_id)
    if record.state in (BatchState.FINALIZING, BatchState.CANCELLING):
        return record
    return replace(move(record, BatchState.FINALIZING, now), is_late=is_late)


def ended(record: BatchRecord, completed: int, failed: int, files: tuple[str, str], now: float) -> BatchRecord:
    """Its files are there, those that have anything in them. `failed` includes what was never run."""
    if record.state is BatchState.CANCELLING:
        state = BatchState.CANCELLED
    else:
        state = BatchState.EXPIRED if record.is_late else BatchState.COMPLETED
    return replace(named(move(record, state, now), *files), completed=completed, failed=failed)
