"""/v1/embeddings, answered by a scripted worker."""

import asyncio
import base64
import contextlib
import json
import math
import threading
from array import array
from typing import Any

import httpx
import pytest

from headrace_router.admission import admit_inputs
from headrace_router.embedding_form import EmbeddingObject, embedding_object
from headrace_router.embeddings import parse_embedding, validate_embedding
from headrace_router.prompt_size import size_of
from headrace_router.settings import RouterSettings
from headrace_shared.codec import unpack_ids
from headrace_shared.errors import InvalidRequest, Overloaded
from headrace_shared.messages import FinishReason, Request, TokenFrame
from tests.router.support import MODEL, Router, ScriptedWorker, make_card, running_router, until

SIZE = 8


def vector_of(request: Request) -> list[float]:
    """Of length 1, and different for different prompts."""
    ids = unpack_ids(request.prompt)
    values = [math.sin(sum(ids) + place) for place in range(SIZE)]
    length = math.sqrt(sum(value * value for value in values))
    return array("f", [value / length for value in values]).tolist()


async def embed(worker: ScriptedWorker, request: Request) -> None:
    frame = TokenFrame(
        request_id=request.request_id,
        choice=0,
        attempt=0,
        index=0,
        tokens=(1,),
        finish=FinishReason.LENGTH,
        embedding=array("f", vector_of(request)).tobytes() if request.embeds else b"",
    )
    worker.publish(request, frame)


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
        assert len(router.worker.requests) == 1000


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


@pytest.mark.parametrize(("hidden_size", "most"), [(0, 2048), (576, 2048), (4096, 512), (10**9, 1)])
def test_a_call_has_as_many_inputs_as_the_broker_can_bear(hidden_size: int, most: int) -> None:
    card = make_card(hidden_size=hidden_size)
    body = parse_embedding(json.dumps({"model": MODEL, "input": ["a"] * most}).encode()).body
    assert len(validate_embedding(body, card)[0]) == most and size_of(body).num_choices == most
    body = parse_embedding(json.dumps({"model": MODEL, "input": ["a"] * (most + 1)}).encode()).body
    with pytest.raises(InvalidRequest, match=f"1 to {most} texts"):
        validate_embedding(body, card)


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
        assert (await ask(router, input="text", dimensions=SIZE)).json()["data"][0]["embedding"] == whole
        reply = await ask(router, input="text", dimensions=SIZE + 1)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "dimensions")


BAD: list[tuple[dict[str, Any], str]] = [
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


async def test_bad_fields_are_named_and_nothing_is_queued() -> None:
    async with running_router(embed) as router:
        for fields, param in BAD:
            reply = await ask(router, **fields)
            assert reply.status_code == 400, reply.text
            assert (reply.json()["error"]["param"] or "").startswith(param), reply.text
        assert router.worker.requests == []


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
