"""Packs and unpacks what is large in a thread: else it would hold up the streams of others."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from headrace_router.responses_api.items import Items
from headrace_router.responses_api.stored import StoredResponse, pack

MOST_AT_ONCE = 64 * 1024
"""Bytes that are packed on the spot."""
MOST_PACKED = 4 * 1024
"""Bytes that are unpacked on the spot. Text of one letter may be a thousand times as long."""

T = TypeVar("T")


async def object_of(stored: StoredResponse) -> dict[str, Any]:
    """Raises ProtocolError, as the others do."""
    return await _unpacked(len(stored.response), lambda: stored.object)


async def input_items_of(stored: StoredResponse) -> Items:
    return await _unpacked(len(stored.items), lambda: stored.input_items)


async def conversation_of(stored: StoredResponse) -> Items:
    return await _unpacked(len(stored.items) + len(stored.response), lambda: stored.conversation)


async def packed(value: Any, num_bytes: int) -> bytes:
    """`num_bytes`: about as long is its text."""
    return pack(value) if num_bytes <= MOST_AT_ONCE else await asyncio.to_thread(pack, value)


async def _unpacked(num_packed: int, unpack: Callable[[], T]) -> T:
    return unpack() if num_packed <= MOST_PACKED else await asyncio.to_thread(unpack)
