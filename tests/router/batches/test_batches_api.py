"""/v1/batches over HTTP: every line answered once, in the documented shape, in the batch lane and as its tenant."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from headrace_router.batches.endpoints import unstored
from headrace_router.batches.record import BatchRecord
from headrace_shared.bus import Bus
from headrace_shared.codec import decode
from headrace_shared.messages import FinishReason, Lane, Outcome, Request
from headrace_shared.subjects import BATCH_RESULTS, BATCHES, CALLS, IDEMPOTENCY
from tests.byte_model import MODEL, byte_ids
from tests.router.batches.batch_support import TEXT, batching, create, jsonl, line, lines_of, until_status, upload
from tests.router.support import ScriptedWorker, prompt_of, says, until


async def records(bus: Bus) -> list[BatchRecord]:
    return [decode(entry.value, BatchRecord) for entry in await bus.entries(BATCHES.name)]


async def test_every_line_is_answered_once_in_the_batch_lane() -> None:
    async with batching(says("answer")) as own:
        client = own.router.client
        batch = await create(client, [line(n, f"Prompt {n}") for n in range(40)], metadata={"a": "b"})
        assert batch["object"] == "batch" and batch["status"] == "validating" and batch["metadata"] == {"a": "b"}
        assert batch["expires_at"] - batch["created_at"] == 86_400 and batch["endpoint"] == TEXT
        done = await until_status(client, batch, "completed")
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert done["error_file_id"] is None and done["errors"] is None
        assert done["created_at"] <= done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
        output = await lines_of(client, done["output_file_id"])
        assert set(output) == {f"line-{n}" for n in range(40)}
        answer = output["line-7"]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["choices"][0]["text"] == "answer"
        assert answer["response"]["request_id"] and answer["id"].startswith("batch_req_")
        assert {request.lane for request in own.requests} == {Lane.BATCH}
        assert Counter(tuple(prompt_of(request)) for request in own.requests).most_common(1)[0][1] == 1
        assert not own.router.worker.requests
        file = (await client.get(f"/v1/files/{done['output_file_id']}")).json()
        assert file["purpose"] == "batch_output" and file["filename"] == f"{batch['id']}_output.jsonl"
        assert await own.router.bus.num_messages(BATCH_RESULTS.name) == 0
        assert await own.router.bus.entries(IDEMPOTENCY.name) == await own.router.bus.entries(CALLS.name) == []


async def test_lines_that_fail_are_in_the_error_file() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        if len(prompt_of(request)) > 100:
            await worker.end(request, Outcome.FAILED, "request_quarantined", "poison")
            return
        await says("ok")(worker, request)

    async with batching(script) as own:
        client = own.router.client
        lines = [
            line(1),
            line(2, body={"temperature": 9}),
            line(3, body={"model": "nobody"}),
            line(4, "x" * 120),
            line(5, "x" * 1000),
            line(6, body={"n": 2}),
        ]
        done = await until_status(client, await create(client, lines), "completed")
        assert done["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
        output, errors = [await lines_of(client, done[f"{kind}_file_id"]) for kind in ("output", "error")]
        assert set(output) == {"line-1", "line-6"} and len(output["line-6"]["response"]["body"]["choices"]) == 2
        told = {
            name: (one["response"]["status_code"], one["response"]["body"]["error"]["code"], one["error"])
            for name, one in errors.items()
        }
        assert told == {
            "line-2": (400, "invalid_value", None),
            "line-3": (404, "model_not_found", None),
            "line-4": (500, "request_quarantined", None),
            "line-5": (400, "context_length_exceeded", None),
        }


async def test_a_bad_input_fails_the_batch_and_names_its_lines() -> None:
    async with batching(says("x")) as own:
        client = own.router.client
        content = jsonl([line(1), line(1), line(2, url="/v1/chat/completions")]) + b"nonsense\n"
        body = {"input_file_id": await upload(client, content), "endpoint": TEXT, "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        failed = await until_status(client, batch, "failed")
        errors = [(error["line"], error["code"], error["param"]) for error in failed["errors"]["data"]]
        assert errors == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "mismatched_url", "url"),
            (4, "invalid_json_line", None),
        ]
        assert failed["output_file_id"] is None and not own.requests
        empty = await until_status(client, await create(client, []), "failed")
        assert empty["errors"]["data"][0]["code"] == "empty_file"


async def test_cancelling_stops_what_runs_and_keeps_what_is_done() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        if prompt_of(request) == byte_ids("fast"):
            await says("done")(worker, request)
            return
        worker.frame(request, byte_ids("a"), 0)
        await asyncio.sleep(3600)

    async with batching(script, batch_concurrency=4) as own:
        client = own.router.client
        batch = await create(client, [line(n, "fast" if n < 5 else "slow") for n in range(30)])
        await until(lambda: len(own.requests) == 9)
        told = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert told["status"] == "cancelling" and told["cancelling_at"]
        done = await until_status(client, batch, "cancelled")
        await until(lambda: len(own.worker.cancels) == 4)
        assert done["request_counts"] == {"total": 30, "completed": 5, "failed": 25} and len(own.requests) == 9
        output, errors = [await lines_of(client, done[f"{kind}_file_id"]) for kind in ("output", "error")]
        assert len(output) == 5 and not set(output) & set(errors) and len(errors) == 25
        assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
        again = await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.json() == done
        finished = await until_status(client, await create(client, [line(1, body={"temperature": 9})]), "completed")
        refused = await client.post(f"/v1/batches/{finished['id']}/cancel")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "batch_not_cancellable"


async def test_when_the_window_ends_finished_lines_are_kept() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        if prompt_of(request) != byte_ids("fast"):
            await asyncio.sleep(3600)
        await says("done")(worker, request)

    async with batching(script, batch_window_s=2.0, batch_concurrency=2, max_active_batches=1) as own:
        client = own.router.client
        batch = await create(client, [line(n, "fast" if n < 2 else "slow") for n in range(6)])
        waiting = await create(client, [line(n, "slow") for n in range(6)])
        done = await until_status(client, batch, "expired")
        assert done["request_counts"] == {"total": 6, "completed": 2, "failed": 4} and done["expired_at"], done
        errors = await lines_of(client, done["error_file_id"])
        assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"} and len(errors) == 4
        assert len(await lines_of(client, done["output_file_id"])) == 2
        await until(lambda: len(own.worker.cancels) >= 2)
        never = await until_status(client, waiting, "expired")
        assert never["output_file_id"] is None and never["request_counts"]["completed"] == 0


async def test_batches_wait_for_their_turn() -> None:
    release = asyncio.Event()

    async def script(worker: ScriptedWorker, request: Request) -> None:
        await release.wait()
        await says("x")(worker, request)

    async with batching(script, max_active_batches=2, max_active_batches_per_tenant=1, max_unfinished_batches=3) as own:
        client = own.router.client
        others = {"Authorization": "Bearer somebody-else"}
        mine = [await create(client, [line(n)]) for n in range(3)]
        theirs = await create(client, [line(1)], others)
        await until(lambda: len(own.requests) == 2)
        await asyncio.sleep(0.5)
        assert len(own.requests) == 2
        states = [(await client.get(f"/v1/batches/{batch['id']}")).json()["status"] for batch in mine]
        assert states == ["in_progress", "validating", "validating"]
        file_id = await upload(client, jsonl([line(1)]))
        body = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
        full = await client.post("/v1/batches", json=body)
        assert full.status_code == 429 and full.json()["error"]["code"] == "too_many_batches"
        release.set()
        for batch in mine:
            await until_status(client, batch, "completed")
        await until_status(client, theirs, "completed", headers=others)


async def test_wrong_calls_are_refused() -> None:
    async with batching(says("x")) as own:
        client = own.router.client
        file_id = await upload(client, jsonl([line(1)]))
        good: dict[str, Any] = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
        for changes, status, param in (
            ({"endpoint": "/v1/models"}, 400, "endpoint"),
            ({"completion_window": "1h"}, 400, "completion_window"),
            ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
            ({"input_file_id": "x"}, 404, "input_file_id"),
            ({"input_file_id": 5}, 400, "input_file_id"),
            ({"metadata": {"a": 1}}, 400, "metadata.a"),
            ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
            ({"metadata": {"a" * 65: ""}}, 400, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after"),
        ):
            reply = await client.post("/v1/batches", json=good | changes)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
        for path in ("/v1/batches/x", "/v1/batches/batch_*", "/v1/batches/batch_" + "0" * 32):
            assert (await client.get(path)).status_code == (await client.post(path + "/cancel")).status_code == 404
        assert await records(own.router.bus) == []


async def test_the_input_of_an_unfinished_batch_is_kept() -> None:
    async with batching(says("x")) as own:
        client = own.router.client
        own.worker.is_taking = False
        batch = await create(client, [line(1)])
        reply = await client.delete(f"/v1/files/{batch['input_file_id']}")
        assert reply.status_code == 409 and reply.json()["error"]["code"] == "file_in_use"
        own.worker.is_taking = True
        done = await until_status(client, batch, "completed")
        assert (await client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
        assert (await lines_of(client, done["output_file_id"])).keys() == {"line-1"}


async def test_a_repeated_creation_is_one_batch() -> None:
    async with batching(says("x")) as own:
        client = own.router.client
        body = {"endpoint": TEXT, "completion_window": "24h"}
        body["input_file_id"] = await upload(client, jsonl([line(1)]))
        key = {"Idempotency-Key": "k"}
        replies = await asyncio.gather(*(client.post("/v1/batches", json=body, headers=key) for _ in range(5)))
        assert len({reply.json()["id"] for reply in replies}) == 1
        other = await client.post("/v1/batches", json=body | {"metadata": {"a": "b"}}, headers=key)
        assert other.status_code == 422
        listed = (await client.get("/v1/batches")).json()
        assert len(listed["data"]) == 1 and listed["has_more"] is False


@pytest.mark.parametrize("size", [10, 700])
async def test_answers_of_any_size_are_kept(size: int) -> None:
    async with batching(says("x" * size, FinishReason.STOP)) as own:
        client = own.router.client
        lines = [line(1, "a", body={"max_tokens": min(size, 200), "n": 16, "logprobs": 5})]
        done = await until_status(client, await create(client, lines), "completed")
        output = await lines_of(client, done["output_file_id"])
        choices = output["line-1"]["response"]["body"]["choices"]
        assert len(choices) == 16 and all(len(choice["text"]) == min(size, 200) for choice in choices)


async def test_a_line_may_pause_for_as_long_as_others_are_served() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("a"), 0)
        await asyncio.sleep(1.0)  # displaced by somebody who waits
        worker.frame(request, byte_ids("b"), 1, finish=FinishReason.LENGTH)

    async with batching(script, stall_timeout_s=0.3) as own:
        client = own.router.client
        done = await until_status(client, await create(client, [line(1)]), "completed")
        output = await lines_of(client, done["output_file_id"])
        assert output["line-1"]["response"]["body"]["choices"][0]["text"] == "ab" and len(own.requests) == 1


async def test_who_waits_for_an_answer_is_in_another_lane() -> None:
    release = asyncio.Event()

    async def script(worker: ScriptedWorker, request: Request) -> None:
        if request.lane is Lane.BATCH:
            await release.wait()
        await says("x")(worker, request)

    async with batching(script, batch_concurrency=4) as own:
        client = own.router.client
        batch = await create(client, [line(n) for n in range(50)])
        await until(lambda: len(own.requests) == 4)
        for _ in range(3):
            reply = await client.post(TEXT, json={"model": MODEL, "prompt": "Hi", "max_tokens": 4})
            assert reply.status_code == 200
        assert {request.lane for request in own.router.worker.requests} == {Lane.INTERACTIVE}
        # Of a batch, no more than its concurrency is ever queued, however long it is.
        assert {request.lane for request in own.requests} == {Lane.BATCH} and len(own.requests) == 4
        assert (await until_status(client, batch, "in_progress"))["request_counts"]["completed"] == 0
        release.set()
        await until_status(client, batch, "completed")


async def test_each_endpoint_answers_in_its_own_shape() -> None:
    chat, responses = "/v1/chat/completions", "/v1/responses"
    asked: dict[str, dict[str, Any]] = {
        chat: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
        responses: {"input": "Hi", "max_output_tokens": 16},
    }
    async with batching(says("answer")) as own:
        client = own.router.client
        for url, fields in asked.items():
            lines = [line(n, url=url) | {"body": {"model": MODEL, **fields}} for n in range(3)]
            done = await until_status(client, await create(client, lines, endpoint=url), "completed")
            assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, url
            output = await lines_of(client, done["output_file_id"])
            body = output["line-1"]["response"]["body"]
            if url == chat:
                assert body["choices"][0]["message"]["content"] == "answer"
            else:
                assert body["object"] == "response" and body["output"][0]["content"][0]["text"] == "answer"
                assert (await client.get(f"/v1/responses/{body['id']}")).status_code == 404
        assert {request.lane for request in own.requests} == {Lane.BATCH}


def test_a_response_is_kept_only_if_that_is_asked_for() -> None:
    assert json.loads(unstored(b'{"input": "x"}')) == {"input": "x", "store": False}
    assert unstored(b'{"input": "x", "store": true}') == b'{"input": "x", "store": true}'
    assert json.loads(unstored(b'{"store": null}')) == {"store": False}
