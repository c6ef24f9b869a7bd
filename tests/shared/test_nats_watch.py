"""What a watch does about faults: nobody but it would notice that nothing is heard any more."""

import asyncio
from typing import cast

import pytest

from headrace_shared.nats_connection import NatsConnection
from headrace_shared.nats_jetstream import JetStream
from headrace_shared.nats_kv import KeyValue
from headrace_shared.nats_watch import Watch


async def test_a_watch_goes_on_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_shared.nats_watch.RETRY_S", 0.001)
    num_tries = 0

    async def follow(watch: Watch) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise KeyError("num_pending")
        watch._ready.set()
        await asyncio.sleep(100.0)

    monkeypatch.setattr(Watch, "_follow", follow)
    nothing = (cast(NatsConnection, None), cast(JetStream, None), cast(KeyValue, None))
    watch = Watch(*nothing, "KEYS", lambda entry, key: None, lambda _: None)
    await watch.open()
    await watch.close()
    assert num_tries == 3
