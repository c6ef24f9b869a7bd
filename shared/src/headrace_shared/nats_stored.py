"""Stored messages as the broker tells them: directly, or in the JSON of an answer of its interface (STREAM.MSG.GET)."""

import base64
from collections.abc import Mapping
from typing import Any

from headrace_shared.bus import Message
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_ack import MAX_DIGITS
from headrace_shared.nats_client import Incoming


def message_of(told: Mapping[str, Any]) -> Message:
    """`told`: the answer's `message`. Raises BusUnavailable if it is not readable."""
    try:
        data, headers = (base64.b64decode(told.get(part, "")) for part in ("data", "hdrs"))
    except ValueError as error:
        raise BusUnavailable(f"the broker's answer is not readable: {error}") from error
    return Message(told["subject"], data, _headers_of(headers), told["seq"])


def _headers_of(block: bytes) -> dict[str, str]:
    """As they are stored: a line that tells the version, then `key: value` lines."""
    lines = (line.partition(":") for line in block.decode(errors="replace").split("\r\n")[1:])
    return {key: value.strip() for key, colon, value in lines if colon}


def stored_message(reply: Incoming) -> Message:
    """From a direct get. Raises BusUnavailable for a status, as when the broker is not ready, and for what is no such
    message."""
    headers = dict(reply.headers)
    place = headers.get("Nats-Sequence", "")
    if reply.status:
        raise BusUnavailable(f"{reply.status} {headers.get('Description', '')}")
    if not (place.isascii() and place.isdigit() and len(place) <= MAX_DIGITS and "Nats-Subject" in headers):
        raise BusUnavailable("the broker's answer is no stored message")
    own = {key: value for key, value in headers.items() if key not in _READ_HEADERS}
    return Message(headers["Nats-Subject"], reply.data, own, int(place))


_READ_HEADERS = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
    | {"Nats-UpTo-Sequence"}
)
