"""Routers that want keys, and keys for them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from headrace_router.settings import RouterSettings
from headrace_shared.api_keys import ApiKey, new_key
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.subjects import KEYS
from tests.router.support import Router, Script, running_router


async def add_key(bus: Bus, **fields: Any) -> dict[str, str]:
    """Headers with a new key."""
    made = new_key()
    given: dict[str, Any] = {"name": "web", "tenant": "acme", "flow": 1, "created": 1} | fields
    record = ApiKey(key_id=made.key_id, secret_hash=made.secret_hash, **given)
    await bus.create(KEYS.name, record.key_id, encode(record))
    return {"Authorization": f"Bearer {made.text}"}


@contextlib.asynccontextmanager
async def strict_router(script: Script, **settings: Any) -> AsyncIterator[Router]:
    broker = MemoryBroker()
    buses = (MemoryBus(broker), MemoryBus(broker))
    async with running_router(script, buses=buses, settings=strict_settings(**settings)) as router:
        yield router


def strict_settings(**changes: Any) -> RouterSettings:
    return RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, require_keys=True, **changes)


async def until_known(router: Router, headers: dict[str, str], *, sees_model: bool = True) -> None:
    async with asyncio.timeout(5.0):
        while True:
            reply = await router.client.get("/v1/models", headers=headers)
            if reply.status_code == 200 and bool(reply.json()["data"]) is sees_model:
                return
            await asyncio.sleep(0.01)
