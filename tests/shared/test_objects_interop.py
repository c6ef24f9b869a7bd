"""Objects are those of NATS' own clients: each side reads what the other has written."""

import os

import nats
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.nats_bus import NatsBus
from headrace_shared.objects import ObjectStore
from headrace_shared.subjects import objects_spec

pytestmark = pytest.mark.nats


async def test_both_ways(nats_server: NatsServer) -> None:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    other = await nats.connect(nats_server.url)
    try:
        store = ObjectStore(bus, objects_spec("TEST", 16 * 1024 * 1024))
        await store.open()
        theirs = await other.jetstream().object_store("TEST")
        ours, content = os.urandom(300_000), os.urandom(500_000)
        writer = store.writer("file-1")
        await writer.write(ours)
        await writer.finish()
        got = await theirs.get("file-1")
        assert got.data == ours and got.info.size == len(ours)
        await theirs.put("their notes.txt", content)
        info = await store.info("their notes.txt")
        assert info is not None
        assert b"".join([piece async for piece in store.pieces(info)]) == content
        assert {entry.name for entry in await theirs.list()} == {"file-1", "their notes.txt"}
        await theirs.delete("their notes.txt")
        assert await store.info("their notes.txt") is None
        await store.delete("file-1")
        assert [info.name for info in await store.infos(10)] == []
    finally:
        await other.close()
        await bus.close()
