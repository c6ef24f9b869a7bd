"""What a message must look like before a bus takes it. The broker would hang up on most of what is refused here."""

import re
from collections.abc import Mapping

from headrace_shared.errors import PayloadTooLarge

HEADER_ROOM = 64 * 1024
"""The broker counts headers as payload: this much of its limit is kept for them."""

_SUBJECT = re.compile(r"[^\s\x00-\x20.*>]+(?:\.[^\s\x00-\x20.*>]+)*")
_HEADER_KEY = re.compile(r"[!-9;-~]+")


def check_subject(subject: str) -> None:
    """Raises ValueError for empty tokens, wildcards and white space: a fault of ours, or an unchecked name."""
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
