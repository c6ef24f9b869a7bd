"""What the head of an HTTP request must be like. Pure.

The parser refuses what is no HTTP. This refuses what two servers could still read in two ways, so that nobody in front
of us takes one request for two.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_HEAD_BYTES = 16 * 1024
MAX_TARGET_BYTES = 8 * 1024
MAX_HEADERS = 100

_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class Refusal(NamedTuple):
    status: bytes
    """Code and phrase."""
    message: bytes
    code: bytes


INVALID = Refusal(b"400 Bad Request", b"This is no valid HTTP request.", b"invalid_http")
TOO_LARGE = Refusal(b"431 Request Header Fields Too Large", b"The request head is too large.", b"headers_too_large")
TOO_MANY = Refusal(b"431 Request Header Fields Too Large", b"There are too many headers.", b"headers_too_large")
TOO_LONG = Refusal(b"414 URI Too Long", b"The path is too long.", b"uri_too_long")
VERSION = Refusal(b"505 HTTP Version Not Supported", b"This version of HTTP is not spoken here.", b"invalid_http")
TINY_CHUNKS = Refusal(b"400 Bad Request", b"The body comes in too many small chunks.", b"invalid_http")
TOO_MANY_CONNECTIONS = Refusal(b"503 Service Unavailable", b"There are too many connections.", b"too_many_connections")


class Head(NamedTuple):
    version: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    """Names in lower case."""
    is_upgrade: bool
    """It asks for another protocol, in a way that cannot be ignored."""


def refusal_of(head: Head) -> Refusal | None:
    if len(head.headers) > MAX_HEADERS:
        return TOO_MANY
    if len(head.target) > MAX_TARGET_BYTES:
        return TOO_LONG
    # 4: a colon, a blank and the end of the line.
    if len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers) > MAX_HEAD_BYTES:
        return TOO_LARGE
    if head.version not in ("1.0", "1.1"):
        return VERSION
    # A whole URL is for proxies: its host would count instead of the header's.
    if head.is_upgrade or not head.target.startswith(b"/"):
        return INVALID
    hosts = [value for name, value in head.headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and head.version == "1.1") or not all(map(_HOST.fullmatch, hosts)):
        return INVALID
    encodings = [value.lower() for name, value in head.headers if name == b"transfer-encoding"]
    if encodings and (encodings != [b"chunked"] or head.version == "1.0"):
        return INVALID
    return None
