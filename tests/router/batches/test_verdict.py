"""What is worth another try, and what the client is told."""

from headrace_router.batches.verdict import MAX_FAILURES, MAX_LOST, MAX_WAIT_S, MIN_WAIT_S, TryAgain, judge
from headrace_shared.errors import (
    Forbidden,
    InvalidRequest,
    LimitReached,
    ModelNotFound,
    Overloaded,
    RequestError,
    ServiceFailure,
)


def verdict(
    error: RequestError, num_failures: int = 0, num_lost: int = 0, *, had_begun: bool = True
) -> TryAgain | None:
    return judge(error, num_failures, num_lost, had_begun=had_begun)


def test_a_want_of_room_is_waited_for_as_long_as_it_takes() -> None:
    for error in (Overloaded("", retry_after_s=7.0), LimitReached("", retry_after_s=7.0, code="insufficient_quota")):
        assert verdict(error, 1000) == TryAgain(7.0)
    assert verdict(Overloaded("", retry_after_s=0.0)) == TryAgain(0.5)
    assert verdict(Overloaded("", retry_after_s=1e9)) == TryAgain(MAX_WAIT_S)


def test_what_can_never_be_is_told() -> None:
    for error in (
        InvalidRequest("", param="n"),
        Forbidden("", code="model_not_allowed"),
        ModelNotFound("m"),
        LimitReached("", retry_after_s=1.0, code="request_exceeds_limit"),
        ServiceFailure("", code="request_quarantined"),
    ):
        assert verdict(error) is None


def test_failures_are_tried_again_a_few_times() -> None:
    waits = []
    num_failures = 0
    while (again := verdict(ServiceFailure(""), num_failures)) is not None:
        assert again.is_failure and not again.is_new
        waits.append(again.after_s)
        num_failures += 1
    assert num_failures == MAX_FAILURES - 1 and waits == sorted(waits)


def test_time_in_the_queue_is_no_failure() -> None:
    timeout = ServiceFailure("", code="timeout")
    again = verdict(timeout, 1000, had_begun=False)
    assert again is not None and not again.is_failure
    assert verdict(timeout, 0, had_begun=True) == verdict(ServiceFailure(""), 0)
    assert verdict(timeout, MAX_FAILURES, had_begun=True) is None


def test_an_answer_that_is_lost_is_asked_for_as_another_request() -> None:
    again = verdict(InvalidRequest("", code="answer_expired"), 1000)
    assert again == TryAgain(MIN_WAIT_S, is_new=True)
    assert verdict(InvalidRequest("", code="answer_expired"), num_lost=MAX_LOST) is None
    busy = verdict(InvalidRequest("", code="idempotency_key_busy"))
    assert busy is not None and not busy.is_new
