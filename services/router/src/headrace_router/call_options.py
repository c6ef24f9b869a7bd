"""What a client asks for in headers. Pure."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import Lane

RESUMABLE = "Headrace-Resumable"
IDEMPOTENCY_KEY = "Idempotency-Key"
TIMEOUT = "Headrace-Timeout"
LAST_EVENT_ID = "Last-Event-ID"
OVERFLOW = "Headrace-Overflow"
QUEUE_EVENTS = "Headrace-Queue-Events"
LANE = "Headrace-Lane"
HEADERS = {
    RESUMABLE: "true: events have ids, and the answer goes on for a while without its client (GET /v1/requests/…).",
    IDEMPOTENCY_KEY: "The same key with the same body is the same answer, for a day.",
    TIMEOUT: "Seconds after which the answer is of no use.",
    OVERFLOW: "true: a smaller model may answer where this one's queue is long.",
    QUEUE_EVENTS: "true: events of the type headrace.queue, and comments, tell position and expected wait of a stream.",
    LANE: "batch: the answer may wait for as long as others have work to do.",
    LAST_EVENT_ID: "Id of the last event that was received: the answer is continued behind it.",
}
"""As clients are told."""
_SWITCH = {"type": "string", "enum": ["true", "false", "1", "0"]}
HEADER_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    RESUMABLE: _SWITCH,
    IDEMPOTENCY_KEY: {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
    TIMEOUT: {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,6})?$"},
    OVERFLOW: _SWITCH,
    QUEUE_EVENTS: _SWITCH,
    LANE: {"type": "string", "enum": [lane.value for lane in Lane]},
    LAST_EVENT_ID: {"type": "string"},
}

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PEOPLE = ("curl/", "httpie/", "wget/")
"""User agents that show a stream as it comes."""
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


class CallOptions(NamedTuple):
    is_resumable: bool = False
    idempotency_key: str | None = None
    timeout_s: float | None = None
    last_event_id: str | None = None
    lane: Lane = Lane.INTERACTIVE
    overflow: bool = False
    queue_events: bool = False
    is_person: bool = False
    """Somebody who reads comments."""


def read_options(headers: Mapping[str, str]) -> CallOptions:
    """`headers` looks names up whatever their case. Raises InvalidRequest, naming the header."""
    key = headers.get(IDEMPOTENCY_KEY)
    if key is not None and _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"The header {IDEMPOTENCY_KEY} must have 1 to 255 printable ASCII characters.", param=IDEMPOTENCY_KEY
        )
    return CallOptions(
        _boolean(headers, RESUMABLE),
        key,
        _timeout_s(headers),
        headers.get(LAST_EVENT_ID) or None,
        _lane(headers),
        _boolean(headers, OVERFLOW),
        _boolean(headers, QUEUE_EVENTS),
        headers.get("User-Agent", "").lower().startswith(_PEOPLE),
    )


def _boolean(headers: Mapping[str, str], name: str) -> bool:
    given = headers.get(name, "false").strip().lower()
    if given not in _BOOLEANS:
        raise InvalidRequest(f"The header {name} must be true or false.", param=name)
    return _BOOLEANS[given]


def _lane(headers: Mapping[str, str]) -> Lane:
    given = headers.get(LANE, Lane.INTERACTIVE.value).strip().lower()
    if given not in tuple(Lane):
        raise InvalidRequest(f"The header {LANE} must be one of {', '.join(Lane)}.", param=LANE)
    return Lane(given)


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    given = headers.get(TIMEOUT)
    if given is None:
        return None
    try:
        seconds = float(given) if len(given) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise InvalidRequest(f"The header {TIMEOUT} must be a positive number of seconds.", param=TIMEOUT)
    return seconds
