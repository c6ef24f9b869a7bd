"""Calls of the JetStream API, as plain requests on one connection, and what its errors mean."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from headrace_shared.errors import (
    BusError,
    BusRefused,
    BusUnavailable,
    OutcomeUnknown,
    PayloadTooLarge,
    QueueFull,
    RevisionConflict,
)
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_connection import NatsConnection

# Error codes of the JetStream API.
CONSUMER_NOT_FOUND = 10014
WRONG_LAST_SEQUENCE = 10071
STREAM_NOT_FOUND = 10059
NO_MESSAGE = 10037
DELETE_FAILED = frozenset({10043, 10057})
MESSAGE_TOO_LARGE = 10054
TEMPORARY = frozenset({10003, 10005, 10006, 10008, 10009})
"""A cluster without a leader, or with too few members for now."""
FULL = frozenset({10077, 10122})
"""Maximum messages or bytes of the stream, or messages of the subject."""


class JetStreamApi:
    def __init__(self, connection: NatsConnection, timeout_s: float) -> None:
        """`timeout_s`: of one call."""
        self.connection = connection
        self.timeout_s = timeout_s

    async def ask(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer as it is, `error` included. Raises BusUnavailable, OutcomeUnknown."""
        body = json.dumps(arguments).encode() if arguments else b""
        reply = await self.connection.request(f"$JS.API.{call}", body, timeout_s=self.timeout_s)
        return answer_of(reply)

    async def must(self, call: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The same, but an `error` is raised, as a BusError."""
        answer = await self.ask(call, arguments)
        if "error" in answer:
            raise error_of(answer, call)
        return answer


class Answer(dict[str, Any]):
    """An object of an answer. Raises OutcomeUnknown for what is missing in it."""

    def __missing__(self, key: str) -> NoReturn:
        raise OutcomeUnknown(f"the broker's answer has no {key}")


def answer_of(reply: Incoming) -> dict[str, Any]:
    """Raises OutcomeUnknown for what is no answer of the API: one that cannot be read is none."""
    try:
        answer = json.loads(reply.data, object_hook=Answer)
    except ValueError as error:
        raise OutcomeUnknown(f"the broker's answer is not readable: {error}") from error
    if not isinstance(answer, dict):
        raise OutcomeUnknown("the broker's answer is not readable")
    return answer


def error_code(answer: Mapping[str, Any]) -> int:
    """0 for none."""
    code: int = answer.get("error", {}).get("err_code", 0)
    return code


def error_of(answer: Mapping[str, Any], what: str, size: int = 0) -> BusError:
    error = answer["error"]
    description = f"{what}: {error.get('description', 'unknown error')}"
    code = error.get("err_code", 0)
    if code == WRONG_LAST_SEQUENCE:
        return RevisionConflict(description)
    if code in FULL:
        return QueueFull(description)
    if code == MESSAGE_TOO_LARGE:
        return PayloadTooLarge(size, size)
    if code in TEMPORARY:
        return BusUnavailable(description)
    return BusRefused(description)
