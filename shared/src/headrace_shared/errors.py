"""All errors that cross a module boundary.

HeadraceError
├── ConfigError            a setting is missing or wrong; the process must not start
├── ProtocolError          bytes that are no message of ours
├── BusError
│   ├── BusUnavailable     not connected, or no answer in time; the operation did not happen
│   │   └── BusRefused     the broker's answer: no
│   ├── OutcomeUnknown     sent, but no answer: it may happen later
│   ├── BusOverloaded      our own send queue is full
│   ├── QueueFull          the stream refuses more messages
│   ├── PayloadTooLarge    above the broker's limit; decided before sending
│   └── RevisionConflict   compare-and-set lost
└── RequestError           told to the client; carries code, message, param
    ├── InvalidRequest     the client's fault
    ├── Unauthorized       nobody knows who asks
    ├── Forbidden          who asks may not
    ├── ModelNotFound
    ├── Overloaded         come back later; carries retry_after_s
    │   └── LimitReached   this client has used what it may; others may go on
    └── ServiceFailure     ours
"""

GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
"""Code of a request that failed because of the form that its answer was to have."""


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""


class ConfigError(HeadraceError):
    """`key` names the setting as the user wrote it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


class ProtocolError(HeadraceError):
    """Bytes that are no message of ours."""


class BusError(HeadraceError):
    """The broker did not do what was asked."""


class BusUnavailable(BusError):
    """Not connected, or no answer in time. The operation did not happen, and will not."""


class BusRefused(BusUnavailable):
    """The broker has answered that it will not: asking again at once gets the same answer."""


class OutcomeUnknown(BusError):
    """The bytes may have reached the broker: the operation may have happened, or may still happen."""


class BusOverloaded(BusError):
    """Our own bounded send queue is full."""


class QueueFull(BusError):
    """The stream is at its limit and refuses new messages."""


class PayloadTooLarge(BusError):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} bytes exceed the limit of {limit}")
        self.size = size
        self.limit = limit


class RevisionConflict(BusError):
    """Somebody else changed the key first."""


class RequestError(HeadraceError):
    """An error that a client is told. `code` is stable, `param` names the offending field."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidRequest(RequestError):
    """The client's fault: a 4xx that will not get better by trying again."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message, code=code, param=param)


class Unauthorized(RequestError):
    """Told to everybody alike: not which part of the key is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Forbidden(RequestError):
    """It is known who asks, and they may not."""


class ModelNotFound(RequestError):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model}' does not exist; GET /v1/models lists those that do.",
            code="model_not_found",
            param="model",
        )


class Overloaded(RequestError):
    """Refused for now. `retry_after_s` is an honest guess, at most 120. `status`: the HTTP status, where the operator
    has chosen one."""

    def __init__(
        self, message: str, *, retry_after_s: float, code: str = "overloaded", status: int | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s
        self.status = status


class LimitReached(Overloaded):
    """A limit of the client's own. `retry_after_s` is when it has room again, which for a daily one may be hours."""


class ServiceFailure(RequestError):
    """Not the client's fault."""

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message, code=code)
