"""Model cards in the broker: what a router must know of a model, written by its workers.

A tokenizer may be tens of megabytes, more than a message holds. So a card is compressed and cut into parts 1 … n of
the bucket MODELS, and part 0, written last, is a manifest with their number and the digest of the whole. A reader that
meets parts of two writers sees the digest fail and waits for the manifest that follows; a writer checks what it wrote.
"""

import asyncio
import hashlib
import os
import random
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import structlog
from msgspec import Struct

from headrace_shared.bus import Bus, Entry, Subscription
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, BusRefused, OutcomeUnknown, ProtocolError, RevisionConflict
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.subjects import MODELS, bucket_stream, model_card_key
from headrace_shared.tasks import end

MAX_CARD_BYTES = 64 * 1024 * 1024
"""Uncompressed."""
PART_BYTES = 512 * 1024
MAX_PARTS = MAX_CARD_BYTES // PART_BYTES + 1
_STORE_ATTEMPTS = 8
_MAX_RETRY_DELAY_S = 5.0

log = structlog.get_logger(__name__)


class CardConflict(BusError):
    """Other writers of the same card kept interfering."""


class _Manifest(Struct, frozen=True, tag=True, kw_only=True):
    model: str
    digest: bytes
    """SHA-256 of all parts in order."""
    num_parts: int


class _Stored(NamedTuple):
    card: ModelCard | None
    """None if there is none, or its parts do not fit together."""
    digest: bytes
    revision: int | None
    """Of the manifest; None if there is none."""


def served_name(model: str) -> str:
    """The model's name in the API when none is set: the last element of a path, without .gguf; anything else, such as
    the built-in name or a hub id, as it is. Depends on the text alone, since only workers see the file."""
    is_path = model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1
    return os.path.basename(os.path.abspath(model)).removesuffix(".gguf") if is_path else model


async def store_card(bus: Bus, card: ModelCard) -> ModelCard:
    """Puts the card into the broker and returns what is there now: with the smallest context of its writers, what all
    of them can, and the creation time of the first. Raises ProtocolError if it is too large, CardConflict,
    BusUnavailable."""
    await bus.ensure_bucket(MODELS)
    key, has_written = model_card_key(card.model, 0), False
    for attempt in range(_STORE_ATTEMPTS):
        if attempt:
            await asyncio.sleep(random.uniform(0.01, 0.05) * 2**attempt)
        stored = await _read(bus, key)
        wanted = _merge(card, stored.card)
        # What replaced ours meanwhile is whole and newer; but our parts may have mixed with those of another writer.
        if stored.card is not None and (has_written or stored.card == wanted):
            return stored.card
        parts = await asyncio.to_thread(_pack, wanted)
        try:
            await _write(bus, wanted.model, parts, stored.revision)
            has_written = True
        except (RevisionConflict, OutcomeUnknown):
            continue
        if (written := (await _read(bus, key)).card) is not None:
            return written
    raise CardConflict(f"{_STORE_ATTEMPTS} times others wrote the card of {card.model} at the same time")


async def load_card(bus: Bus, model: str) -> ModelCard | None:
    """The model's card, or None if there is none (or none complete). Raises BusUnavailable."""
    return (await _read(bus, model_card_key(model, 0))).card


async def has_card(bus: Bus, model: str) -> bool:
    """Whether there is one, complete or not. Raises BusError."""
    return await bus.get(MODELS.name, model_card_key(model, 0)) is not None


async def clear_cards(bus: Bus) -> None:
    """Forgets all models: a new deployment starts."""
    try:
        await bus.num_messages(bucket_stream(MODELS.name))
    except BusRefused:  # there is no bucket yet
        return
    for entry in await bus.entries(MODELS.name):
        await bus.remove(MODELS.name, entry.key)


async def watch_cards(
    bus: Bus, on_card: Callable[[ModelCard], None], on_current: Callable[[], None] = lambda: None
) -> Subscription:
    """Calls `on_card` on the event loop for each complete card there is, and again for each changed one; `on_current`
    whenever all that are known of have been read, for the first time also if there are none."""
    await bus.ensure_bucket(MODELS)
    watcher = _Watcher(bus, on_card, on_current)
    await watcher.start()
    return watcher


class _Watcher:
    """Reads the cards whose manifest changed, one after the other, in a task of its own."""

    def __init__(self, bus: Bus, on_card: Callable[[ModelCard], None], on_current: Callable[[], None]) -> None:
        self._bus = bus
        self._on_card = on_card
        self._on_current = on_current
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._seen: dict[str, bytes] = {}
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.watch(MODELS.name, self._on_change)
        self._wake.set()
        self._task = asyncio.create_task(self._run(), name="model-cards")

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        if self._task is not None:
            await end(self._task)

    def _on_change(self, entry: Entry | None, key: str) -> None:
        if key.endswith(".0") and entry is not None:
            self._changed.add(key)
            self._wake.set()
        elif entry is None:
            self._seen.pop(key, None)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for key in sorted(self._changed):
                await self._refresh(key)
            self._on_current()

    async def _refresh(self, key: str) -> None:
        delay_s = 0.1
        self._changed.discard(key)
        while True:
            try:
                stored = await _read(self._bus, key)
                break
            except BusError as error:
                log.warning("model card not readable yet", key=key, error=str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_RETRY_DELAY_S)
        if stored.card is not None and self._seen.get(key) != stored.digest:
            self._seen[key] = stored.digest
            try:
                self._on_card(stored.card)
            except Exception:  # one bad card must not hide the others
                log.exception("model card not accepted", model=stored.card.model)


def _merge(card: ModelCard, stored: ModelCard | None) -> ModelCard:
    if stored is None:
        return card
    return msgspec.structs.replace(
        card,
        context=min(card.context, stored.context),
        constrained_decoding=card.constrained_decoding and stored.constrained_decoding,
        created=stored.created,
    )


async def _write(bus: Bus, model: str, parts: list[bytes], revision: int | None) -> None:
    for number, part in enumerate(parts, start=1):
        await bus.put(MODELS.name, model_card_key(model, number), part)
    digest = hashlib.sha256(b"".join(parts)).digest()
    manifest = encode(_Manifest(model=model, digest=digest, num_parts=len(parts)))
    key = model_card_key(model, 0)
    if revision is None:
        await bus.create(MODELS.name, key, manifest)
    else:
        await bus.update(MODELS.name, key, manifest, revision)


async def _read(bus: Bus, manifest_key: str) -> _Stored:
    entry = await bus.get(MODELS.name, manifest_key)
    if entry is None:
        return _Stored(None, b"", None)
    nothing = _Stored(None, b"", entry.revision)
    try:
        manifest = decode(entry.value, _Manifest)
        if not 1 <= manifest.num_parts <= MAX_PARTS or model_card_key(manifest.model, 0) != manifest_key:
            raise ProtocolError(f"manifest of {manifest.model!r} is not plausible")
        parts = []
        for number in range(1, manifest.num_parts + 1):
            part = await bus.get(MODELS.name, model_card_key(manifest.model, number))
            if part is None:
                return nothing
            parts.append(part.value)
        packed = b"".join(parts)
        if hashlib.sha256(packed).digest() != manifest.digest:
            return nothing
        card = await asyncio.to_thread(_unpack, packed)
        if card.model != manifest.model:
            raise ProtocolError(f"the card of {manifest.model!r} names {card.model!r}")
        return _Stored(card, manifest.digest, entry.revision)
    except ProtocolError as error:
        log.warning("model card is unusable", key=manifest_key, error=str(error))
        return nothing


def _pack(card: ModelCard) -> list[bytes]:
    """Compressed [length of head][head: the card without tokenizer][tokenizer], in parts. The tokenizer stays outside
    the message since it may exceed a message's limit."""
    head = encode(msgspec.structs.replace(card, tokenizer=b""))
    content = struct.pack("<I", len(head)) + head + card.tokenizer
    if len(content) > MAX_CARD_BYTES:
        raise ProtocolError(f"model card of {len(content)} bytes exceeds {MAX_CARD_BYTES}")
    packed = zlib.compress(content, 6)
    return [packed[start : start + PART_BYTES] for start in range(0, len(packed), PART_BYTES)]


def _unpack(packed: bytes) -> ModelCard:
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(packed, MAX_CARD_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"not compressed: {error}") from error
    if not unpacker.eof or unpacker.unused_data or len(content) < 4:
        raise ProtocolError("truncated, or too large")
    (head_size,) = struct.unpack_from("<I", content)
    card = decode(content[4 : 4 + head_size], ModelCard)
    return msgspec.structs.replace(card, tokenizer=content[4 + head_size :])
