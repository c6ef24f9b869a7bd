"""LoRA adapters as the broker has them: one record each, under its name."""

import re
from typing import NamedTuple

from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import AdapterRecord
from headrace_shared.subjects import ADAPTERS, adapter_key

MAX_ADAPTERS = 64
"""Of one model. What a worker says of each goes with every Hello."""
MAX_PROBLEM_CHARS = 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


class StoredAdapter(NamedTuple):
    record: AdapterRecord
    revision: int


def is_adapter_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def stored_adapter(entry: Entry) -> StoredAdapter:
    """Raises ProtocolError for what is no record, or not under its own name."""
    record = decode(entry.value, AdapterRecord)
    if adapter_key(record.name) != entry.key or not is_adapter_name(record.name):
        raise ProtocolError(f"the record of an adapter is under {entry.key!r}, which is not its name")
    return StoredAdapter(record, entry.revision)


async def find_adapter(bus: Bus, name: str) -> StoredAdapter | None:
    """Raises ProtocolError or BusUnavailable."""
    entry = await bus.get(ADAPTERS.name, adapter_key(name))
    return None if entry is None else stored_adapter(entry)


async def store_adapter(bus: Bus, record: AdapterRecord, known: StoredAdapter | None) -> StoredAdapter:
    """In the place of what is known; nothing is overwritten unseen. Raises RevisionConflict, BusUnavailable or
    OutcomeUnknown."""
    key, data = adapter_key(record.name), encode(record)
    if known is None:
        return StoredAdapter(record, await bus.create(ADAPTERS.name, key, data))
    return StoredAdapter(record, await bus.update(ADAPTERS.name, key, data, known.revision))


async def remove_adapter(bus: Bus, known: StoredAdapter) -> None:
    """Raises RevisionConflict, BusUnavailable or OutcomeUnknown."""
    await bus.remove(ADAPTERS.name, adapter_key(known.record.name), known.revision)
