"""The API keys, as the broker has them: a change is known here within milliseconds."""

import structlog

from headrace_router.identity import Identity, anonymous, known
from headrace_shared.api_keys import PREFIX, ApiKey, is_secret_of, parse_key
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode
from headrace_shared.errors import ProtocolError, Unauthorized
from headrace_shared.subjects import KEYS

MAX_KEYS = 100_000

_NOBODY = ApiKey(key_id="", secret_hash=bytes(32), name="", tenant="", flow=0, created=0)
"""Compared with where there is no such key, so that it takes as long."""

log = structlog.get_logger(__name__)


class KeyTable:
    def __init__(self, *, are_required: bool) -> None:
        self._are_required = are_required
        self._keys: dict[str, ApiKey] = {}

    async def open(self, bus: Bus) -> None:
        """Returns when all keys are known. Raises BusError."""
        await bus.ensure_bucket(KEYS)
        await bus.watch(KEYS.name, self.on_change)

    def on_change(self, entry: Entry | None, key: str) -> None:
        """Of the bucket KEYS. Without an entry the key is revoked. What is no key, no operator has written: a key that
        was known stays."""
        if entry is None:
            self._keys.pop(key, None)
            return
        try:
            record = decode(entry.value, ApiKey)
        except ProtocolError as error:
            log.error("undecodable API key is ignored", key_id=key, is_known=key in self._keys, error=str(error))
            return
        if record.key_id == key and (key in self._keys or len(self._keys) < MAX_KEYS):
            self._keys[key] = record

    def has(self, key_id: str) -> bool:
        return key_id in self._keys

    @property
    def are_required(self) -> bool:
        return self._are_required

    def get(self, key_id: str) -> ApiKey | None:
        return self._keys.get(key_id)

    def identify(self, authorization: str, api_key: str = "") -> Identity:
        """Who sends these headers (`Authorization`, `x-api-key`). Raises Unauthorized."""
        scheme, _, token = authorization.partition(" ")
        text = token.strip() if scheme.lower() == "bearer" else ""
        text = text or api_key.strip()
        given = parse_key(text)
        if given is not None:
            record = self._keys.get(given.key_id, _NOBODY)
            if is_secret_of(record, given.secret):
                return known(record)
        if self._are_required or text.startswith(PREFIX):
            # Also where none is needed: whose key was revoked must not go on as nobody in particular.
            raise Unauthorized("An API key is required." if not text else "The API key is not valid.")
        return anonymous(authorization or api_key)
