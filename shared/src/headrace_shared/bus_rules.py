"""What a message must look like before a bus takes it. The broker would hang up on most of what is refused here."""

import re
from collections.abc import Callable, Mapping

from headrace_shared.errors import PayloadTooLarge

HEADER_ROOM = 64 * 1024
"""The broker counts headers as payload: this much of its limit is kept for them."""

MAX_SUBJECT_BYTES = 2048
"""The broker hangs up on a line of more than 4 KiB, and a line may hold two subjects."""

_SUBJECT = re.compile(r"[^\s\x00-\x20.*>]+(?:\.[^\s\x00-\x20.*>]+)*")
_HEADER_KEY = re.compile(r"[!-9;-~]+")


_STORED = "Nats-Stream"
"""A header of what the broker reads out of a stream."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a subject is one of those that the pattern means (`*`: any token, `>` at the end: any rest)."""
    if "*" not in pattern and ">" not in pattern:
        return pattern.__eq__
    tokens = [".+" if token == ">" else r"[^.]+" if token == "*" else re.escape(token) for token in pattern.split(".")]
    match = re.compile(r"\.".join(tokens)).fullmatch
    return lambda subject: match(subject) is not None


def is_out_of_a_stream(headers: Mapping[str, str]) -> bool:
    """Whether the broker sent this itself, out of a stream. Whoever may read a stream may name any subject for the
    answer, and so have it said where he may say nothing; likewise whoever may make a consumer, but then the message
    has the subject that it was stored under (`matcher`)."""
    return _STORED in headers


def check_subject(subject: str) -> None:
    """Raises ValueError for empty tokens, wildcards, white space and great length: a fault of ours, or an unchecked
    name."""
    if len(subject.encode()) > MAX_SUBJECT_BYTES:
        raise ValueError(f"subject of {len(subject)} characters: {subject[:80]!r}...")
    if _SUBJECT.fullmatch(subject) is None:
        raise ValueError(f"malformed subject {subject!r}")


def check_size(data: bytes, headers: Mapping[str, str] | None, max_data: int, max_headers: int) -> None:
    """Raises PayloadTooLarge; ValueError for headers that would break out of their line."""
    if len(data) > max_data:
        raise PayloadTooLarge(len(data), max_data)
    if not headers:
        return
    size = 16
    for key, value in headers.items():
        if _HEADER_KEY.fullmatch(key) is None or "\r" in value or "\n" in value:
            raise ValueError(f"malformed header {key!r}: {value!r}")
        size += len(key) + len(value.encode()) + 4
    if size > max_headers:
        raise PayloadTooLarge(size, max_headers)
