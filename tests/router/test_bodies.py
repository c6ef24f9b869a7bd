"""What bodies hold of the memory for all of them, and until when."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from headrace_router import bodies as limits
from headrace_router.bodies import LOOK_BYTES, SMALL_PART, Body, BodyLimits, ByteBudget, ClientGone, Share, receive_json
from headrace_router.call_record import Wording
from headrace_router.preparation import MAX_KEPT_CHARS, Endpoint, Parsed
from headrace_router.schemas import ChatBody
from headrace_shared.errors import InvalidRequest, Overloaded

LARGE = 1 << 16
SMALL = LARGE // SMALL_PART


@pytest.fixture(autouse=True)
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two large ones, and two small ones."""
    monkeypatch.setattr(limits, "LARGE_AT_ONCE", 2)
    monkeypatch.setattr(limits, "SMALL_AT_ONCE", 2)


def budget() -> ByteBudget:
    return ByteBudget(LARGE)


async def receive(budget: ByteBudget, parts: Sequence[bytes | None]) -> Body:
    """None: the client goes."""
    messages: list[Message] = [
        {"type": "http.disconnect"} if part is None else {"type": "http.request", "body": part, "more_body": True}
        for part in parts
    ]
    messages[-1]["more_body"] = False

    async def next_one() -> Message:
        return messages.pop(0)

    return await receive_json(Headers({}), next_one, BodyLimits(2 * LARGE, 5.0, budget))


def room(budget: ByteBudget, num: int) -> int:
    """How many of this size there is room for."""
    shares: list[Share] = []
    try:
        while True:
            share = Share(budget)
            share.become(num)
            shares.append(share)
    except Overloaded:
        return len(shares)
    finally:
        for share in shares:
            share.become(0)


async def test_a_body_holds_its_bytes_until_it_is_closed() -> None:
    bodies = budget()
    with await receive(bodies, [b"x" * SMALL] * SMALL_PART) as body:
        assert body.num_bytes == len(body.data) == LARGE
        assert room(bodies, LARGE) == 1
    assert room(bodies, LARGE) == 2
    body.close()
    assert room(bodies, LARGE) == 2, "once"


async def test_what_was_made_of_it_counts_in_place_of_its_bytes() -> None:
    bodies = budget()
    with await receive(bodies, [b"x" * LARGE]) as body:
        body.was_read(b"digest", 2 * LARGE)
        assert room(bodies, LARGE) == 0 and body.digest == b"digest"
        with pytest.raises(Overloaded):
            body.was_read(b"digest", 3 * LARGE)
        assert room(bodies, LARGE) == 2
    assert room(bodies, LARGE) == 2


async def test_many_tokens_count_until_the_answer_has_ended() -> None:
    bodies = budget()
    with await receive(bodies, [b"x" * LARGE]) as body, body.part() as part:
        body.is_tokens(SMALL)
        assert room(bodies, LARGE) == 2 and room(bodies, SMALL) == 2, "few do not"
        body.is_tokens(LARGE)
        part.is_tokens(LARGE)
        assert room(bodies, LARGE) == 0
        with pytest.raises(Overloaded):
            part.is_tokens(LARGE + 1)
        assert room(bodies, LARGE) == 1
    assert room(bodies, LARGE) == 2


async def test_large_bodies_keep_no_small_one_out() -> None:
    bodies = budget()
    held = [await receive(bodies, [b"x" * LARGE]) for _ in range(2)]
    with pytest.raises(Overloaded):
        await receive(bodies, [b"x" * LARGE])
    assert room(bodies, SMALL) == 2
    small = await receive(bodies, [b"x", b"y"])
    assert small.data == b"xy"
    for body in (*held, small):
        body.close()


@pytest.mark.parametrize("ending", [b"x" * LARGE * 2, None])
async def test_what_does_not_come_whole_holds_nothing(ending: bytes | None) -> None:
    bodies = budget()
    with pytest.raises((InvalidRequest, ClientGone)):
        await receive(bodies, [b"x" * LARGE, ending])
    assert room(bodies, LARGE) == 2


async def test_a_client_that_is_cut_off_holds_nothing() -> None:
    bodies = budget()
    has_begun = asyncio.Event()

    async def never() -> Message:
        if has_begun.is_set():
            await asyncio.Event().wait()
        has_begun.set()
        return {"type": "http.request", "body": b"x" * LARGE, "more_body": True}

    task = asyncio.create_task(receive_json(Headers({}), never, BodyLimits(2 * LARGE, 60.0, bodies)))
    await has_begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert room(bodies, LARGE) == 2


async def test_of_a_call_whose_prompt_is_tokens_only_short_values_are_kept() -> None:
    bodies = budget()
    long = "x" * (MAX_KEPT_CHARS + 1)
    data = {"model": "m", "messages": [{"role": "user", "content": long}], "stream": True, "unknown": long, "n": 3}
    given = await receive(bodies, [json.dumps(data).encode()])
    body = ChatBody.model_validate_json(given.data)
    source, items = ChatBody.model_validate_json(given.data), [long]
    parsed = Parsed(Endpoint.CHAT, body, given, Wording(), made_of=(source, items))
    parsed.forget()
    for each in (body, source):
        assert (each.model, each.stream, each.n) == ("m", True, 3)
        assert long not in repr(each)
    assert not items
    assert parsed.size.num_chars == len(long), "it is known how large it was"


@pytest.mark.parametrize("beginning", [b" " * 9, b"[", b" \n[[", b"null", b'"', b"\xff"])
async def test_what_can_become_no_object_is_not_read_to_its_end(beginning: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await receive(budget(), [beginning + b" " * LOOK_BYTES, None])
    assert caught.value.code == "invalid_type"
    with pytest.raises(ClientGone):
        await receive(budget(), [b"\r\n\t {" + b" " * LOOK_BYTES, None])


@pytest.mark.parametrize("rest", [b"{}", b"{" + b" " * LOOK_BYTES + b"}"])
async def test_a_byte_order_mark_before_a_body_is_ignored(rest: bytes) -> None:
    with await receive(budget(), [b"\xef", b"\xbb\xbf" + rest[:-1], rest[-1:]]) as body:
        assert body.data == rest


async def test_a_short_body_s_own_reader_says_what_is_wrong_with_it() -> None:
    for data in ([b"[1]"], [b" " * 100, b"null"], [b"[" * 1000, b"]"], [b""]):
        with await receive(budget(), data) as body:
            assert body.data == b"".join(data)
