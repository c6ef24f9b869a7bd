"""What a client is told of a request that ended without an answer."""

from headrace_router.admission import retry_after
from headrace_shared.errors import GRAMMAR_TOO_COMPLEX, InvalidRequest, Overloaded, RequestError, ServiceFailure
from headrace_shared.messages import Outcome, RequestEnded


def error_of(ended: RequestEnded, form_param: str) -> RequestError:
    """`form_param`: the field that asks for a form of the answer."""
    message = ended.message or "The request could not be completed."
    match ended.outcome:
        case Outcome.SHED:
            return Overloaded(message, retry_after_s=retry_after(2.0), code=ended.code or "overloaded")
        case Outcome.EXPIRED:
            return ServiceFailure(message, code=ended.code or "timeout")
        case Outcome.CANCELLED:
            return ServiceFailure(ended.message or "The request was cancelled.", code=ended.code or "cancelled")
    if ended.code == GRAMMAR_TOO_COMPLEX:
        # Found out only on the way, and the client's own all the same: the next try would end no better.
        named = f"'{form_param}' cannot be used: {message[:1].lower()}{message[1:]}" if form_param else message
        return InvalidRequest(named, param=form_param or None, code=ended.code)
    return ServiceFailure(message, code=ended.code or "internal_error")
