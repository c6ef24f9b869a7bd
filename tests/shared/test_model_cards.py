"""Cards arrive whole or not at all."""

import asyncio
import hashlib
import random
import zlib
from collections.abc import Callable, Mapping

import msgpack
import msgspec
import pytest

from headrace_shared.bus import Entry
from headrace_shared.errors import BusUnavailable, ProtocolError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.model_cards import (
    MAX_CARD_BYTES,
    PART_BYTES,
    clear_cards,
    load_card,
    served_name,
    store_card,
    watch_cards,
)
from headrace_shared.subjects import MODELS, model_card_key


def make_card(model: str = "tiny", size: int = 100, seed: int = 0, context: int = 1024, created: int = 1) -> ModelCard:
    return ModelCard(
        model=model,
        tokenizer=random.Random(seed).randbytes(size),
        vocab_size=512,
        context=context,
        eos_token_ids=(2,),
        created=created,
    )


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def eventually(seen: list[ModelCard], expected: list[ModelCard]) -> None:
    await until(lambda: seen == expected)


@pytest.mark.parametrize("size", [0, 100, PART_BYTES, 5 * PART_BYTES + 17])
async def test_a_stored_card_is_loaded(size: int) -> None:
    bus, card = MemoryBus(), make_card(size=size)
    assert await load_card_or_none(bus, "tiny") is None
    assert await store_card(bus, card) == card
    assert await load_card(bus, "tiny") == card


async def load_card_or_none(bus: MemoryBus, model: str) -> ModelCard | None:
    await bus.ensure_bucket(MODELS)
    return await load_card(bus, model)


async def test_a_tokenizer_may_exceed_a_message() -> None:
    bus, card = MemoryBus(), make_card(size=9 * 1024 * 1024)
    await store_card(bus, card)
    assert await load_card(bus, "tiny") == card


async def test_a_card_has_a_largest_size() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        await store_card(MemoryBus(), msgspec.structs.replace(make_card(), tokenizer=b"x" * MAX_CARD_BYTES))


async def test_models_do_not_disturb_each_other() -> None:
    bus = MemoryBus()
    cards = [make_card(model, seed=seed) for seed, model in enumerate(["a", "b", "org/a", "org_a"])]
    for card in cards:
        await store_card(bus, card)
    assert [await load_card(bus, card.model) for card in cards] == cards


async def test_the_smallest_context_and_the_first_date_count() -> None:
    bus = MemoryBus()
    await store_card(bus, make_card(context=2048, created=5))
    assert (await store_card(bus, make_card(context=1024, created=6))).context == 1024
    stored = await store_card(bus, make_card(context=4096, created=7))
    assert (stored.context, stored.created) == (1024, 5)
    assert await load_card(bus, "tiny") == stored


async def test_a_model_can_what_all_its_workers_can() -> None:
    bus = MemoryBus()
    limited = msgspec.structs.replace(make_card(), constrained_decoding=False)
    assert (await store_card(bus, make_card())).constrained_decoding
    assert not (await store_card(bus, limited)).constrained_decoding
    assert not (await store_card(bus, make_card())).constrained_decoding


async def test_an_equal_card_is_not_written_again() -> None:
    bus = MemoryBus()
    await store_card(bus, make_card(created=1))
    before = await bus.entries(MODELS.name)
    await store_card(bus, make_card(created=2))
    assert await bus.entries(MODELS.name) == before


async def test_another_tokenizer_replaces_the_old_one() -> None:
    bus = MemoryBus()
    await store_card(bus, make_card(size=3 * PART_BYTES, seed=1))
    await store_card(bus, make_card(size=10, seed=2))
    assert await load_card(bus, "tiny") == make_card(size=10, seed=2)


class SlowBus(MemoryBus):
    """Lets other writers in between at every step."""

    async def put(self, bucket: str, key: str, value: bytes) -> int:
        await asyncio.sleep(random.uniform(0, 0.003))
        return await super().put(bucket, key, value)


@pytest.mark.parametrize("attempt", range(5))
async def test_concurrent_writers_leave_one_whole_card(attempt: int) -> None:
    bus = SlowBus()
    cards = [make_card(size=3 * PART_BYTES, seed=seed, context=1000 + seed) for seed in range(3)]
    seen: list[ModelCard] = []
    watcher = await watch_cards(bus, seen.append)
    returned = await asyncio.gather(*(store_card(bus, card) for card in cards))
    assert {card.tokenizer for card in returned} <= {card.tokenizer for card in cards}
    stored = await load_card(bus, "tiny")
    assert stored is not None and stored.tokenizer in {card.tokenizer for card in cards}
    await until(lambda: bool(seen) and seen[-1] == stored)
    assert {card.tokenizer for card in seen} <= {card.tokenizer for card in cards}
    await watcher.close()


async def test_a_half_written_card_is_none() -> None:
    bus = MemoryBus()
    await store_card(bus, make_card(size=3 * PART_BYTES))
    await bus.put(MODELS.name, model_card_key("tiny", 2), b"of another writer")
    assert await load_card(bus, "tiny") is None
    await bus.remove(MODELS.name, model_card_key("tiny", 2))
    assert await load_card(bus, "tiny") is None
    assert await store_card(bus, make_card(size=3 * PART_BYTES)) == await load_card(bus, "tiny")


def manifest(model: str, parts: list[bytes], num_parts: int | None = None) -> bytes:
    digest = hashlib.sha256(b"".join(parts)).digest()
    fields = {"type": "_Manifest", "model": model, "digest": digest, "num_parts": num_parts or len(parts)}
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(
    ("zero", "parts"),
    [
        (b"", []),
        (b"\xc1", []),
        (manifest("tiny", [b"not zlib"]), [b"not zlib"]),
        (manifest("other", [b"x"]), [b"x"]),
        (manifest("tiny", [], num_parts=-1), []),
        (manifest("tiny", [], num_parts=10**9), []),
        (manifest("tiny", [b"\x78\x9c\x03\x00\x00\x00\x00\x01"]), [b"\x78\x9c\x03\x00\x00\x00\x00\x01"]),
    ],
)
async def test_garbage_is_no_card(zero: bytes, parts: list[bytes]) -> None:
    bus = MemoryBus()
    await bus.ensure_bucket(MODELS)
    for number, part in enumerate([zero, *parts]):
        await bus.put(MODELS.name, model_card_key("tiny", number), part)
    assert await load_card(bus, "tiny") is None
    assert await store_card(bus, make_card()) == make_card()


async def test_a_decompression_bomb_is_no_card() -> None:
    bomb = zlib.compress(b"\0" * (MAX_CARD_BYTES + 1))
    bus = MemoryBus()
    await bus.ensure_bucket(MODELS)
    await bus.put(MODELS.name, model_card_key("tiny", 1), bomb)
    await bus.put(MODELS.name, model_card_key("tiny", 0), manifest("tiny", [bomb]))
    assert await load_card(bus, "tiny") is None


async def test_a_watcher_hears_what_is_there_and_what_changes() -> None:
    bus, seen = MemoryBus(), list[ModelCard]()
    await store_card(bus, make_card("a"))
    watcher = await watch_cards(bus, seen.append)
    await eventually(seen, [make_card("a")])
    await store_card(bus, make_card("b"))
    await eventually(seen, [make_card("a"), make_card("b")])
    await store_card(bus, make_card("a", context=512))
    await eventually(seen, [make_card("a"), make_card("b"), make_card("a", context=512)])
    await store_card(bus, make_card("a", context=512))
    await asyncio.sleep(0.05)
    assert len(seen) == 3
    await watcher.close()
    await store_card(bus, make_card("c"))
    await asyncio.sleep(0.05)
    assert len(seen) == 3


async def test_a_watcher_hears_a_card_again_that_was_cleared() -> None:
    bus, seen = MemoryBus(), list[ModelCard]()
    watcher = await watch_cards(bus, seen.append)
    await store_card(bus, make_card(context=512))
    await eventually(seen, [make_card(context=512)])
    await clear_cards(bus)
    assert await load_card(bus, "tiny") is None
    await store_card(bus, make_card(context=2048))
    await eventually(seen, [make_card(context=512), make_card(context=2048)])
    await watcher.close()


async def test_a_reader_that_rejects_a_card_still_hears_the_next() -> None:
    bus, seen = MemoryBus(), list[ModelCard]()

    def on_card(card: ModelCard) -> None:
        if card.model == "bad":
            raise ValueError("no tokenizer")
        seen.append(card)

    watcher = await watch_cards(bus, on_card)
    await store_card(bus, make_card("bad"))
    await store_card(bus, make_card("good"))
    await eventually(seen, [make_card("good")])
    await watcher.close()


async def test_a_watcher_outlives_a_broker_outage() -> None:
    class FlakyBus(MemoryBus):
        num_failures = 2

        async def get(self, bucket: str, key: str) -> Entry | None:
            if self.num_failures:
                self.num_failures -= 1
                raise BusUnavailable("gone")
            return await super().get(bucket, key)

    store, seen = FlakyBus(), list[ModelCard]()
    store.num_failures = 0
    await store_card(store, make_card())
    store.num_failures = 2
    watcher = await watch_cards(store, seen.append)
    await eventually(seen, [make_card()])
    await watcher.close()


NAMES: Mapping[str, str] = {
    "smollm2-135m": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "/models/SmolLM2.Q4_1.gguf": "SmolLM2.Q4_1",
    "models/SmolLM2.Q4_1.gguf": "SmolLM2.Q4_1",
    "SmolLM2.gguf": "SmolLM2",
    "/models/qwen3/": "qwen3",
    "./qwen3": "qwen3",
    "~/models/qwen3": "qwen3",
    "data/models/qwen3": "qwen3",
}


@pytest.mark.parametrize("model", NAMES)
def test_names_in_the_api(model: str) -> None:
    assert served_name(model) == NAMES[model]
