"""A batch's states: what is not in the table changes nothing, and whatever happens every batch has one end."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace_router.batches.answers import batch_object
from headrace_router.batches.record import (
    TRANSITIONS,
    BatchError,
    BatchRecord,
    BatchState,
    IllegalTransition,
    cancelled,
    checked,
    counted,
    ended,
    finalized,
    move,
    rejected,
    taken,
)
from headrace_shared.codec import decode, encode
from tests.router.batches.records import NEW

ERRORS = (BatchError(code="invalid_json_line", message="bad", line=3),)


def shown_of(record: BatchRecord) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(batch_object(record))
    return shown


def test_only_what_is_in_the_table_is_possible() -> None:
    for state in BatchState:
        for goal in BatchState:
            record = replace(NEW, state=state)
            if goal in TRANSITIONS[state]:
                moved = move(record, goal, 123.9)
                assert moved.state is goal and getattr(moved, f"{goal}_at") == 123
            else:
                with pytest.raises(IllegalTransition):
                    move(record, goal, 123.9)
                assert record.state is state


def test_the_way_of_a_batch() -> None:
    record = checked(taken(NEW, 1, 101.0), 10, 102.0)
    record = counted(record, 4, 1)
    assert counted(record, 3, 1) == record  # what is late tells nothing
    record = taken(record, 2, 103.0)
    assert (record.started_at, record.epoch, record.completed) == (101, 2, 4)
    record = finalized(record, "file-a", "file-b", 104.0, is_late=False)
    shown = shown_of(record)
    assert shown["status"] == "finalizing" and shown["output_file_id"] is None
    record = ended(finalized(record, "file-c", "file-d", 105.0, is_late=True), 9, 1, ("file-c", "file-d"), 106.0)
    shown = shown_of(record)
    assert shown == shown | {
        "status": "completed",
        "in_progress_at": 102,
        "finalizing_at": 104,
        "completed_at": 106,
        "expired_at": None,
        "output_file_id": "file-c",
        "error_file_id": "file-d",
        "request_counts": {"total": 10, "completed": 9, "failed": 1},
        "errors": None,
    }


def test_late_and_cancelled_batches_end_as_such() -> None:
    running = checked(taken(NEW, 1, 101.0), 10, 102.0)
    late = ended(finalized(running, "a", "b", 1000.0, is_late=True), 3, 7, ("a", "b"), 1001.0)
    assert late.state is BatchState.EXPIRED and late.expired_at == 1001
    stopped = finalized(cancelled(running, 200.0), "a", "b", 201.0, is_late=True)
    assert stopped.state is BatchState.CANCELLING
    assert ended(stopped, 3, 7, ("a", ""), 202.0).state is BatchState.CANCELLED
    waiting = ended(finalized(NEW, "", "", 1000.0, is_late=True), 0, 0, ("", ""), 1000.0)
    assert waiting.state is BatchState.EXPIRED and shown_of(waiting)["output_file_id"] is None


def test_a_bad_input_fails_with_its_lines() -> None:
    failed = rejected(NEW, ERRORS, 105.0)
    data = [{"code": "invalid_json_line", "message": "bad", "param": None, "line": 3}]
    assert shown_of(failed)["errors"] == {"object": "list", "data": data}
    assert failed.is_over and len(rejected(NEW, ERRORS * 1000, 1.0).errors) == 50


def test_nobody_with_an_old_lease_takes_a_batch() -> None:
    record = taken(NEW, 5, 101.0)
    for epoch in (1, 5):
        with pytest.raises(IllegalTransition):
            taken(record, epoch, 102.0)
    with pytest.raises(IllegalTransition):
        taken(rejected(record, ERRORS, 102.0), 6, 103.0)


STEPS = {
    "take": lambda record, n: taken(record, record.epoch + 1, n),
    "check": lambda record, n: checked(record, 10, n),
    "reject": lambda record, n: rejected(record, ERRORS, n),
    "count": lambda record, n: counted(record, n % 11, n % 3),
    "cancel": lambda record, n: cancelled(record, n),
    "finalize": lambda record, n: finalized(record, f"o{n}", f"e{n}", n, is_late=n % 2 == 0),
    "end": lambda record, n: ended(record, 9, 1, ("o", "e"), n),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(101, 999)), max_size=40))
def test_after_any_history_a_batch_has_at_most_one_end_and_never_leaves_it(steps: list[tuple[str, int]]) -> None:
    record: Any = NEW
    for name, number in steps:
        before = record
        try:
            record = STEPS[name](record, number)
        except IllegalTransition:
            assert record == before
            continue
        assert not before.is_over or name == "count"
        assert record.epoch >= before.epoch and record.completed >= min(before.completed, 9)
        assert decode(encode(record), BatchRecord) == record
    ends = [record.completed_at, record.expired_at, record.cancelled_at, record.failed_at]
    assert sum(bool(at) for at in ends) == record.is_over
    assert shown_of(record)["status"] in set(BatchState)
