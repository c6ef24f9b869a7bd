"""The model's card stays in the broker as long as a worker of the model lives."""

import asyncio

import pytest
from msgspec.structs import replace

from headrace_shared.memory_bus import MemoryBus
from headrace_shared.model_cards import load_card
from headrace_shared.subjects import MODELS, bucket_stream
from headrace_worker import card_keeper
from headrace_worker.card_keeper import CardKeeper
from tests.scripted_engine import CARD
from tests.shared.bus_helpers import until


async def test_a_card_that_the_broker_has_lost_is_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_keeper, "CHECK_S", 0.02)
    bus = MemoryBus()
    card = replace(CARD, model="tiny")
    keeper = CardKeeper(bus, card)
    await keeper.store()
    keeping = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.1)
    bus.broker.streams.pop(bucket_stream(MODELS.name))
    await asyncio.sleep(0.1)
    assert not keeping.done()
    await bus.ensure_bucket(MODELS)
    await until(lambda: bus.broker.streams[bucket_stream(MODELS.name)].num_messages() > 0)
    assert await load_card(bus, "tiny") == card
    keeping.cancel()
