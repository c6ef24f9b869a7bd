"""How background responses end in the store, also where there is little room."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from headrace_router.responses_api import store
from headrace_router.responses_api.keeping import BackgroundKeeper
from headrace_router.responses_api.response_object import facts_of
from headrace_router.responses_api.store import ResponseStore
from headrace_router.responses_api.stored import StoredResponse, pack
from headrace_shared import codec
from headrace_shared.codec import encode
from headrace_shared.errors import Forbidden, ServiceFailure
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import FinishReason, RequestId, TokenFrame, TokenLogprobs, TopLogprob
from headrace_shared.subjects import RESPONSES, TOKENS, UNFINISHED, tokens_subject
from tests.router.responses_api.call_records import REQUEST_ID, ROUTER, record
from tests.router.support import until

MAX_PAYLOAD = 20_000


class Keeping:
    """A response that has begun, and whose tokens are in the log."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker(MAX_PAYLOAD))
        self.store = ResponseStore(self.bus)
        self.unfinished: set[str] = set()

    async def begin(self, num_tokens: int, *, with_logprobs: bool) -> BackgroundKeeper:
        def on_unfinished(entry: Any, key: str) -> None:
            (self.unfinished.discard if entry is None else self.unfinished.add)(key)

        await self.bus.ensure_stream(TOKENS)
        await self.store.open(on_unfinished)
        keeper = BackgroundKeeper(
            self.store, self.bus, ROUTER, StoredResponse(owner="o", response=b"", items=pack([{"id": "msg_1"}]))
        )
        await keeper.queued(record())
        await until(lambda: self.unfinished == {REQUEST_ID})
        top = tuple(TopLogprob(token, -1.0 / (token + 1)) for token in range(20))
        for index in range(num_tokens):
            frame = TokenFrame(
                request_id=REQUEST_ID,
                choice=0,
                attempt=0,
                index=index,
                tokens=(index,),
                logprobs=(TokenLogprobs(-0.5, top),) if with_logprobs else (),
                finish=FinishReason.STOP if index == num_tokens - 1 else None,
            )
            self.bus.publish(tokens_subject(ROUTER, REQUEST_ID), encode(frame))
        return keeper

    async def ended(self) -> StoredResponse:
        await until(lambda: not self.unfinished)
        found = await self.store.find(REQUEST_ID)
        assert found is not None
        return found.stored


def completed(keeper: BackgroundKeeper, text: str = "abc") -> bytes:
    return msgspec.json.encode({**keeper.response, "status": "completed", "output": [{"text": text}]})


async def test_the_end_comes_with_the_tokens() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(10, with_logprobs=False)
    assert keeper.response["status"] == "queued" and keeper.response["created_at"] == 5
    assert keeper.response["id"] == f"resp_{REQUEST_ID}" and keeper.response["background"]
    await keeper.answered(completed(keeper))
    stored = await keeping.ended()
    assert stored.object["status"] == "completed" and stored.input_items == [{"id": "msg_1"}]
    assert [token for frame in stored.answer for token in frame.tokens] == list(range(10))
    assert stored.answer[-1].finish is FinishReason.STOP and await keeping.bus.entries(UNFINISHED.name) == []


async def test_rather_without_the_tokens_than_not_at_all() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(300, with_logprobs=True)
    await keeper.answered(completed(keeper))
    stored = await keeping.ended()
    assert stored.object["status"] == "completed" and stored.answer == ()


async def test_what_is_too_large_fails() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(3, with_logprobs=False)
    noise = "".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9000), k=20_000)))
    await keeper.answered(completed(keeper, noise))
    stored = await keeping.ended()
    assert stored.object["status"] == "failed" and "too large" in stored.object["error"]["message"]


async def test_what_is_larger_than_any_message_is_told_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Keeping()
    keeper = await keeping.begin(3, with_logprobs=False)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10_000)
    noise = "".join(map(chr, random.Random(1).choices(range(0x4E00, 0x9000), k=7_000)))
    await keeper.answered(completed(keeper, noise))
    stored = await keeping.ended()
    assert stored.object["status"] == "failed" and "too large" in stored.object["error"]["message"]


async def test_many_that_begin_at_once_fill_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "OWNERS", RESPONSES.max_bytes // 5000)
    keeping = Keeping()
    await keeping.store.open(lambda entry, key: None)
    stored = StoredResponse(owner="o", response=b"x" * 1000, items=b"")
    made = [keeping.store.create(RequestId(f"{number:032x}"), stored) for number in range(20)]
    told = await asyncio.gather(*made, return_exceptions=True)
    assert (
        sum(isinstance(each, Forbidden) for each in told) == 16 and len(await keeping.bus.entries(RESPONSES.name)) == 4
    )


async def test_an_end_counts_once() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(3, with_logprobs=False)
    found = await keeping.store.find(REQUEST_ID)
    assert found is not None
    cancelled = msgspec.structs.replace(found.stored, response=pack({**keeper.response, "status": "cancelled"}))
    await keeping.store.update(REQUEST_ID, cancelled, found.revision)
    await keeper.answered(completed(keeper))
    assert (await keeping.ended()).object["status"] == "cancelled"


async def test_a_failure_is_an_end() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(3, with_logprobs=False)
    await keeper.failed(ServiceFailure("It broke."))
    stored = await keeping.ended()
    assert stored.object["error"] == {"code": "server_error", "message": "It broke."}
    assert [frame.tokens for frame in stored.answer] == [(0,), (1,), (2,)]


async def test_what_was_deleted_does_not_come_back() -> None:
    keeping = Keeping()
    keeper = await keeping.begin(3, with_logprobs=False)
    found = await keeping.store.find(REQUEST_ID)
    assert found is not None
    await keeping.store.delete(REQUEST_ID)
    await keeper.answered(completed(keeper))
    await until(lambda: not keeping.unfinished)
    assert await keeping.store.find(REQUEST_ID) is None


def test_a_response_names_the_adapter_that_it_was_asked_of() -> None:
    (request,) = record().requests
    assert facts_of(request, 5).model == "m"
    assert facts_of(msgspec.structs.replace(request, adapter="sql"), 5).model == "sql"
