"""What clients are told about batches. Data only."""

from typing import Literal

from msgspec import Struct

from headrace_router.batches.record import WINDOW, BatchError, BatchRecord, BatchState


class BatchErrorObject(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str = WINDOW
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_object(record: BatchRecord) -> BatchObject:
    errors = BatchErrors(data=[_error_object(error) for error in record.errors]) if record.errors else None
    return BatchObject(
        id=record.batch_id,
        endpoint=record.endpoint,
        errors=errors,
        input_file_id=record.input_file_id,
        status=record.state,
        # Named before they are complete, so that whoever goes on knows them; shown when they are.
        output_file_id=record.output_file_id or None if record.is_over else None,
        error_file_id=record.error_file_id or None if record.is_over else None,
        created_at=int(record.created_at),
        in_progress_at=record.in_progress_at or None,
        expires_at=record.expires_at,
        finalizing_at=record.finalizing_at or None,
        completed_at=record.completed_at or None,
        failed_at=record.failed_at or None,
        expired_at=record.expired_at or None,
        cancelling_at=record.cancelling_at or None,
        cancelled_at=record.cancelled_at or None,
        request_counts=RequestCounts(total=record.total, completed=record.completed, failed=record.failed),
        metadata=record.metadata,
    )


def _error_object(error: BatchError) -> BatchErrorObject:
    return BatchErrorObject(code=error.code, message=error.message, param=error.param, line=error.line)
