"""What tests of the Responses API share: a client, scripts of workers, and looks into the broker."""

import asyncio
import json
from typing import Any

import httpx

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import FinishReason, Request
from headrace_shared.subjects import TOKENS, UNFINISHED
from tests.byte_model import END, MODEL, byte_ids
from tests.router.support import Router, Script, ScriptedWorker

PATH = "/v1/responses"


def body(given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]", blocks[-1]
    return [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks[:-1]]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def create(client: httpx.AsyncClient, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    reply = await client.post(PATH, json=body(given, **fields))
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def retrieve(
    client: httpx.AsyncClient, response_id: str, until_status: str, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    async with asyncio.timeout(10.0):
        while True:
            reply = await client.get(f"{PATH}/{response_id}", headers=headers)
            assert reply.status_code == 200, reply.text
            response: dict[str, Any] = reply.json()
            if response["status"] == until_status:
                return response
            assert response["status"] in ("queued", "in_progress"), response
            await asyncio.sleep(0.02)


def echoes() -> Script:
    """Says what the prompt is, without its control tokens."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        prompt = [token for token in unpack_ids(request.prompt) if token < END - 2]
        tokens = [*prompt, END][: request.stop.max_tokens]
        worker.frame(request, tokens, 0, finish=FinishReason.STOP)

    return script


def in_steps(text: str, gate: asyncio.Event, before: int = 5) -> Script:
    """So many tokens at once; the rest, in frames of two, when the gate opens."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        tokens = [*byte_ids(text), END]
        worker.frame(request, tokens[:before], 0)
        await gate.wait()
        for start in range(before, len(tokens), 2):
            part = tokens[start : start + 2]
            is_last = start + 2 >= len(tokens)
            worker.frame(request, part, start, finish=FinishReason.STOP if is_last else None)

    return script


async def until_none_is_unfinished(router: Router) -> None:
    for _ in range(3000):
        if not await router.bus.entries(UNFINISHED.name):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a response has no end")


async def forget_tokens(router: Router) -> None:
    """As after a while: the token log holds nothing for ever."""
    stored = router.broker.streams[TOKENS.name].stored
    for sequence in list(stored):
        del stored[sequence]
