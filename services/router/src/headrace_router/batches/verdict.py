"""What to do about a line that could not be answered: try again, and when, or tell. Pure."""

from typing import NamedTuple

from headrace_shared.errors import InvalidRequest, Overloaded, RequestError, ServiceFailure

MAX_FAILURES = 3
"""Of a line's own; refusals for want of room do not count."""
MAX_LOST = 10
"""Answers of a line that were lost with the token log."""
MIN_WAIT_S = 0.5
MAX_WAIT_S = 60.0
_FINAL = frozenset({"request_exceeds_limit", "request_quarantined"})
"""The next try would end the same, or do more harm."""


class TryAgain(NamedTuple):
    after_s: float
    is_new: bool = False
    """As another request, since the answer to this one is lost."""
    is_failure: bool = False


def judge(error: RequestError, num_failures: int, num_lost: int, *, had_begun: bool) -> TryAgain | None:
    """None: tell the client. `num_failures`, `num_lost`: of this line before, failures and answers."""
    if error.code in _FINAL:
        return None
    match error:
        case Overloaded():
            # Its own rate, the queue's length, a model or a broker that is away: it can wait as long as the batch.
            return TryAgain(min(MAX_WAIT_S, max(MIN_WAIT_S, error.retry_after_s)))
        case InvalidRequest(code="answer_expired") if num_lost < MAX_LOST:
            return TryAgain(MIN_WAIT_S, is_new=True)
        case InvalidRequest(code="idempotency_key_busy"):
            return TryAgain(1.0)
        case ServiceFailure(code="timeout") if not had_begun:
            return TryAgain(MIN_WAIT_S)  # it waited behind others
        case ServiceFailure() if num_failures + 1 < MAX_FAILURES:
            return TryAgain(min(MAX_WAIT_S, MIN_WAIT_S * 4**num_failures), is_failure=True)
    return None
