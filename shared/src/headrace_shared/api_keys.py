"""API keys: how they are made and recognised, and what is stored of them.

A key is `hr-<id>-<secret>`. The id is public and names the record; the secret has 256 random bits, so that a plain hash
of it cannot be searched for, and nothing slow is needed. Nobody stores the secret: it is shown once.
"""

import hashlib
import hmac
import re
import secrets
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from headrace_shared.messages import Lane

_KEY = re.compile(r"hr-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
PREFIX = "hr-"
MAX_FLOWS = 32
"""Tenants with queues of their own; further ones share them (`subjects.py`)."""


class Priority(StrEnum):
    """Requests of a higher class go before those of a lower one, and take places from them."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def level(self) -> int:
        """As in `Request.priority`."""
        return {Priority.LOW: -1, Priority.NORMAL: 0, Priority.HIGH: 1}[self]


class ApiKey(Struct, frozen=True, tag=True, kw_only=True):
    """The record of a key, in the bucket KEYS under its id. Limits of 0 are none."""

    key_id: str
    secret_hash: bytes
    """SHA-256."""
    name: str
    tenant: str
    """Whose it is. A tenant's keys share its requests, its cached blocks and its share of the workers."""
    flow: int
    """The tenant's queues, 1 to MAX_FLOWS."""
    created: int
    """Seconds since the epoch."""
    requests_per_minute: int = 0
    """Each answer to each prompt counts as one."""
    tokens_per_minute: int = 0
    """Of prompts and answers together."""
    max_concurrent: int = 0
    tokens_per_day: int = 0
    """Of the UTC day."""
    models: tuple[str, ...] = ()
    """Those that may be asked; empty: all."""
    weight: float = 1.0
    """The tenant's share of the workers, relative to others'."""
    priority: Priority = Priority.NORMAL
    lane: Lane = Lane.INTERACTIVE
    may_overflow: bool = False
    """A smaller model may answer when the one that was asked for is overloaded."""
    is_admin: bool = False
    """It may load and unload adapters."""


class NewKey(NamedTuple):
    text: str
    key_id: str
    secret_hash: bytes


class GivenKey(NamedTuple):
    key_id: str
    secret: str


def new_key() -> NewKey:
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return NewKey(f"{PREFIX}{key_id}-{secret}", key_id, _hash(secret))


def parse_key(text: str) -> GivenKey | None:
    """None if it does not look like a key of ours."""
    match = _KEY.fullmatch(text)
    return None if match is None else GivenKey(*match.groups())


def is_secret_of(record: ApiKey, secret: str) -> bool:
    """Takes the same time wherever they differ."""
    return hmac.compare_digest(record.secret_hash, _hash(secret))


def choose_flow(tenant: str, keys: list[ApiKey]) -> int:
    """The queues of the tenant's other keys, or those that the fewest tenants have."""
    for key in keys:
        if key.tenant == tenant:
            return key.flow
    tenants = {key.tenant: key.flow for key in keys}
    num_tenants = [list(tenants.values()).count(flow) for flow in range(1, MAX_FLOWS + 1)]
    return 1 + num_tenants.index(min(num_tenants))


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
