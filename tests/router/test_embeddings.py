"""/v1/embeddings, answered by a scripted worker."""

import asyncio
import base64
import contextlib
import math
import threading
from array import array
from typing import Any

import httpx
import msgspec
import pytest

from headrace_router import admission
from headrace_router.admission import admit_inputs
from headrace_router.bodies import Body
from headrace_router.call_record import Dialect, Wording
from headrace_router.embedding_form import EmbeddingObject, embedding_object
from headrace_router.embedding_pieces import pieces_for
from headrace_router.embeddings import as_completion
from headrace_router.identity import known
from headrace_router.preparation import Endpoint, Parsed
from headrace_router.schemas import CompletionBody, EmbeddingBody
from headrace_router.settings import RouterSettings
from headrace_shared.api_keys import ApiKey
from headrace_shared.codec import unpack_ids
from headrace_shared.errors import Overloaded
from headrace_shared.messages import Request
from tests.byte_model import CONTEXT, MODEL, make_card
from tests.router.keys import add_key, until_known
from tests.router.scripts import EMBEDDING_SIZE, embed, vector_of
from tests.router.support import Router, ScriptedWorker, running_router, until


async def ask(router: Router, **fields: Any) -> httpx.Response:
    return await router.client.post("/v1/embeddings", json={"model": MODEL} | fields)


async def test_each_input_has_its_embedding_in_order() -> None:
    async with running_router(embed) as router:
        reply = await ask(router, input=["one", "another one", "x"], user="me")
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        by_prompt = {bytes(request.prompt): vector_of(request) for request in router.worker.requests}
        assert answer["object"] == "list" and answer["model"] == MODEL
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        assert all(item["object"] == "embedding" for item in answer["data"])
        assert sorted(item["embedding"] for item in answer["data"]) == sorted(by_prompt.values())
        num_tokens = sum(len(request.prompt) // 4 for request in router.worker.requests)
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert all(request.embeds and request.stop.max_tokens == 1 for request in router.worker.requests)
        assert all(not request.stop.stop_token_ids for request in router.worker.requests)


async def test_inputs_come_as_texts_or_token_ids() -> None:
    async with running_router(embed) as router:
        for given in ("text", ["text"], [5, 6, 7], [[5, 6, 7]]):
            assert len((await ask(router, input=given)).json()["data"]) == 1
        prompts = [list(unpack_ids(request.prompt)) for request in router.worker.requests]
        assert prompts[0] == prompts[1] and prompts[2] == prompts[3] == [5, 6, 7]


async def test_a_thousand_inputs_are_one_call() -> None:
    async with running_router(embed) as router:
        answer = (await ask(router, input=[f"text {number}" for number in range(1000)])).json()
        assert [item["index"] for item in answer["data"]] == list(range(1000))
        assert len({tuple(item["embedding"]) for item in answer["data"]}) > 1
        # On a slow machine some are delivered twice.
        assert len({request.request_id for request in router.worker.requests}) == 1000


async def test_many_embeddings_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def written(*arguments: Any) -> EmbeddingObject:
        threads.add(threading.get_ident())
        return embedding_object(*arguments)

    monkeypatch.setattr("headrace_router.embedding_writer.embedding_object", written)
    async with running_router(embed) as router:
        assert (await ask(router, input=["text"])).status_code == 200
        assert threads == {threading.get_ident()}
        threads.clear()
        assert (await ask(router, input=["text"] * 1000)).status_code == 200
        assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("hidden_size", "max_concurrent", "sizes"),
    [
        (0, 0, [2048]),
        (576, 0, [2048]),
        (4096, 0, [512, 512, 512, 512]),
        (4096, 1000, [512, 512, 512, 512]),
        (1024, 2000, [2000, 48]),
        (10**9, 0, [1] * 2048),
    ],
)
def test_no_more_inputs_run_at_once_than_broker_and_caller_bear(
    hidden_size: int, max_concurrent: int, sizes: list[int]
) -> None:
    key = ApiKey(key_id="k", secret_hash=b"", name="n", tenant="t", flow=1, created=0, max_concurrent=max_concurrent)
    texts = [f"text {number}" for number in range(2048)]
    parsed = parsed_embedding(texts)
    pieces = pieces_for(parsed, make_card(hidden_size=hidden_size), known(key))
    assert [piece.size.num_choices for piece in pieces] == sizes and parsed.size.num_choices == 2048
    prompts = [piece.body.prompt for piece in pieces if isinstance(piece.body, CompletionBody)]
    assert [text for part in prompts for text in part] == texts


def parsed_embedding(given: Any) -> Parsed:
    body, form = as_completion(EmbeddingBody(model=MODEL, input=given))
    return Parsed(Endpoint.EMBEDDING, body, Body(b""), Wording(Dialect.EMBEDDINGS, msgspec.json.encode(form)))


LARGE = make_card(hidden_size=1 << 18)
"""Eight of its embeddings are what the broker bears."""


async def test_more_inputs_than_run_at_once_are_one_answer_all_the_same() -> None:
    async with running_router(embed, card=LARGE) as router:
        texts = ["x" * number for number in range(1, 21)]
        one_by_one = [(await ask(router, input=text)).json() for text in texts]
        reply = await ask(router, input=texts)
        assert reply.status_code == 200 and reply.headers["headrace-model"] == MODEL
        answer = reply.json()
        assert answer["data"] == [{**each["data"][0], "index": number} for number, each in enumerate(one_by_one)]
        num_tokens = sum(each["usage"]["prompt_tokens"] for each in one_by_one)
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert {name for name in answer} == {"object", "data", "model", "usage"} and answer["model"] == MODEL
        packed = (await ask(router, input=texts, encoding_format="base64", dimensions=3)).json()["data"]
        short = (await ask(router, input=texts, dimensions=3)).json()["data"]
        for number, (each, plain) in enumerate(zip(packed, short, strict=True)):
            assert array("f", base64.b64decode(each["embedding"])).tolist() == plain["embedding"]
            assert each["index"] == plain["index"] == number
        assert (await router.client.get("/load")).json() == {"server_load": 0}


async def test_pieces_are_computed_one_after_the_other_and_end_with_their_client() -> None:
    async def slow(worker: ScriptedWorker, request: Request) -> None:
        await go.wait()
        await embed(worker, request)

    go = asyncio.Event()
    async with running_router(slow, card=LARGE) as router:
        asked = asyncio.create_task(ask(router, input=["a"] * 20))
        await until(lambda: len(router.worker.requests) == 8)
        await asyncio.sleep(0.05)
        assert len(router.worker.requests) == 8
        asked.cancel()
        await until(lambda: len(router.worker.cancels) == 8)
        go.set()
        await asyncio.sleep(0.05)
        assert len(router.worker.requests) == 8


async def test_a_piece_that_finds_no_room_waits_but_the_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "retry_after", lambda seconds: seconds / 20)
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_inflight=20)
    turn = asyncio.Semaphore(0)

    async def slow(worker: ScriptedWorker, request: Request) -> None:
        await turn.acquire()
        await embed(worker, request)

    async with running_router(slow, card=LARGE, settings=settings) as router:
        asked = asyncio.create_task(ask(router, input=["a"] * 12))
        await until(lambda: len(router.worker.requests) == 8)
        others = [asyncio.create_task(ask(router, input="b")) for _ in range(10)]
        await until(lambda: len(router.worker.requests) == 18)
        refused = await ask(router, input=["c"] * 12)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        for _ in range(8):
            turn.release()
        await asyncio.sleep(0.1)
        assert len(router.worker.requests) == 18, "half of the places are taken"
        for _ in range(100):
            turn.release()
        assert len((await asked).json()["data"]) == 12
        await asyncio.gather(*others)


async def test_what_is_wrong_with_the_last_input_is_said_before_anything_is_computed() -> None:
    async with running_router(embed, card=LARGE) as router:
        for bad in ("", [], [10**6], [-1]):
            given = [["a"] * 19 + [bad], [[1]] * 19 + [bad]][isinstance(bad, list)]
            reply = await ask(router, input=given)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input"), reply.text
        reply = await ask(router, input=["a"] * 20, dimensions=EMBEDDING_SIZE + 1)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")
        assert len(router.worker.requests) == 8, "how long an embedding is, its first ones tell"


async def test_a_repeated_call_is_answered_again_piece_by_piece() -> None:
    async with running_router(embed, card=LARGE) as router:
        headers = {"Idempotency-Key": "once"}
        body = {"model": MODEL, "input": [f"text {number}" for number in range(20)]}
        first, second = [await router.client.post("/v1/embeddings", json=body, headers=headers) for _ in range(2)]
        assert first.status_code == 200 and first.json() == second.json() and len(router.worker.requests) == 20
        assert "headrace-request-id" not in first.headers
        other = await router.client.post("/v1/embeddings", json={**body, "input": ["x"] * 20}, headers=headers)
        assert other.status_code == 422


async def test_each_input_counts_and_who_may_run_few_at_once_gets_many_all_the_same() -> None:
    async with running_router(embed) as router:
        headers = await add_key(router.bus, requests_per_minute=30, max_concurrent=4, tokens_per_minute=600)
        await until_known(router, headers)

        async def asked(num: int) -> httpx.Response:
            fields = {"model": MODEL, "input": ["abc"] * num}
            return await router.client.post("/v1/embeddings", json=fields, headers=headers)

        reply = await asked(20)
        assert reply.status_code == 200 and len(reply.json()["data"]) == 20
        reply = await asked(18)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        left = [int(reply.headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "tokens")]
        assert 10 <= left[0] < 18 and 540 <= left[1] < 600
        assert (await asked(10)).status_code == 200
        reply = await asked(31)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "request_exceeds_limit")
        assert reply.headers["x-should-retry"] == "false" and "inputs" in reply.json()["error"]["message"]
        wrong = await add_key(router.bus, requests_per_minute=30)
        await until_known(router, wrong)
        bad = {"model": MODEL, "input": ["a"] * 8 + [""]}
        assert (await router.client.post("/v1/embeddings", json=bad, headers=wrong)).status_code == 400
        left_over = (await router.client.get("/v1/models", headers=wrong)).headers["x-ratelimit-remaining-requests"]
        assert left_over in ("29", "30"), "what is not valid is one request at most"


async def test_calls_with_many_inputs_leave_half_of_the_places() -> None:
    async def slow(worker: ScriptedWorker, request: Request) -> None:
        await go.wait()
        await embed(worker, request)

    go = asyncio.Event()
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, max_inflight=20)
    async with running_router(slow, settings=settings) as router:
        first = asyncio.create_task(ask(router, input=["a"] * 15))  # alone it may be larger
        await until(lambda: len(router.worker.requests) == 15)
        refused = await ask(router, input=["a"] * 2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        single = asyncio.create_task(ask(router, input="a"))
        await until(lambda: len(router.worker.requests) == 16)
        go.set()
        assert (await first).status_code == (await single).status_code == 200
        assert (await ask(router, input=["a"] * 2)).status_code == 200


@pytest.mark.parametrize(
    ("num_inputs", "in_flight", "is_let_in"),
    [(30, 0, True), (15, 4, True), (15, 5, True), (15, 6, False), (2, 9, True), (2, 10, False), (30, 1, False)],
)
def test_where_a_call_finds_room(num_inputs: int, in_flight: int, is_let_in: bool) -> None:
    with contextlib.nullcontext() if is_let_in else pytest.raises(Overloaded):
        admit_inputs(num_inputs, in_flight, 20)


async def test_base64_holds_the_same_floats() -> None:
    async with running_router(embed) as router:
        plain = (await ask(router, input="text")).json()["data"][0]["embedding"]
        packed = (await ask(router, input="text", encoding_format="base64")).json()["data"][0]["embedding"]
        assert array("f", base64.b64decode(packed)).tolist() == plain


async def test_fewer_dimensions_are_the_first_ones_at_length_1() -> None:
    async with running_router(embed) as router:
        whole = (await ask(router, input="text")).json()["data"][0]["embedding"]
        short = (await ask(router, input="text", dimensions=3)).json()["data"][0]["embedding"]
        length = math.sqrt(sum(value * value for value in whole[:3]))
        assert short == pytest.approx([value / length for value in whole[:3]], abs=1e-6)
        assert (await ask(router, input="text", dimensions=EMBEDDING_SIZE)).json()["data"][0]["embedding"] == whole
        reply = await ask(router, input="text", dimensions=EMBEDDING_SIZE + 1)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")


async def test_inputs_that_are_too_long_are_cut_where_that_is_wanted() -> None:
    async with running_router(embed, card=make_card(adds_bos=True, bos_token="<|endoftext|>")) as router:
        for wish, length in ((10, 10), (-1, CONTEXT - 1)):
            reply = await ask(router, input=["x" * 400, "y" * 300], truncate_prompt_tokens=wish)
            assert reply.status_code == 200, reply.text
            assert [len(request.prompt) // 4 for request in router.worker.requests[-2:]] == [length, length]
        for adds, length in ((None, 4), (True, 4), (False, 3)):
            assert (await ask(router, input="abc", add_special_tokens=adds)).status_code == 200
            assert len(router.worker.requests[-1].prompt) // 4 == length


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [""]}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [[1, 10**30]]}, "input"),
    ({"input": "x" * 100_000}, "input"),
    ({"input": [5] * 300}, "input"),
    ({"input": {"a": 1}}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 10**9}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "user": "u" * 2000}, "user"),
]


async def test_who_embeds_has_asked_for_no_token() -> None:
    async with running_router(embed) as router:
        message = (await ask(router, input=[5] * CONTEXT)).json()["error"]["message"]
        assert "requested" not in message and f"the input has {CONTEXT} tokens" in message
        assert (await ask(router, input=[5] * (CONTEXT - 1))).status_code == 200


async def test_bad_fields_are_named_and_nothing_is_queued() -> None:
    async with running_router(embed) as router:
        for fields, param in BAD:
            reply = await ask(router, **fields)
            assert reply.status_code == 400, reply.text
            assert (reply.json()["error"]["param"] or "").startswith(param), reply.text
        assert router.worker.requests == []


async def test_the_input_that_is_wrong_is_named() -> None:
    async with running_router(embed) as router:
        long = await ask(router, input=["a", "b", "x" * 5000])
        empty = await ask(router, input=["a", ""])
        alone = await ask(router, input=[""])
    assert "However, 'input[2]' has " in long.json()["error"]["message"]
    assert empty.json()["error"]["message"] == "'input[1]' must not be empty."
    assert alone.json()["error"]["message"] == "'input' must not be empty."


async def test_an_unknown_model_is_404() -> None:
    async with running_router(embed) as router:
        assert (await router.client.post("/v1/embeddings", json={"model": "?", "input": "a"})).status_code == 404


async def test_a_repeated_call_with_its_key_is_answered_again_and_not_run_again() -> None:
    async with running_router(embed) as router:
        headers = {"Idempotency-Key": "once"}
        body = {"model": MODEL, "input": ["a", "b"]}
        first = await router.client.post("/v1/embeddings", json=body, headers=headers)
        second = await router.client.post("/v1/embeddings", json=body, headers=headers)
        assert first.status_code == second.status_code == 200
        assert first.json() == second.json()
        assert len(router.worker.requests) == 2
