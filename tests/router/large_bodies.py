"""The largest bodies that a router takes, of every kind; and a router of its own process that is given them."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from headrace_shared.broker import NatsServer
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.model_cards import store_card
from headrace_shared.nats_bus import NatsBus
from tests.byte_model import make_card
from tests.integration.deployment import Deployment
from tests.router.support import ScriptedWorker, says

MAX_BYTES = 16 << 20
CONTEXT = 32_768
AT_ONCE = 13
CARD = make_card(context=CONTEXT)
_WORDS = "the wheel in the stream turns "
_HEAD_BYTES = 400
"""For what is around a text."""


def texts(num_bytes: int) -> str:
    return _WORDS * (num_bytes // len(_WORDS))


def _chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _ids(num: int) -> list[int]:
    return [number % 256 for number in range(num)]


def _body(ensure_ascii: bool = False, **fields: Any) -> bytes:
    body = json.dumps({"model": CARD.model, "max_tokens": 2, **fields}, ensure_ascii=ensure_ascii).encode()
    assert len(body) <= MAX_BYTES, len(body)
    return body


_LONG = MAX_BYTES - _HEAD_BYTES
_CUT = 6_500_000
"""Longer ones are refused by their length."""
CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

KINDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a chat that is cut": (CHAT, lambda: _body(messages=_chat(texts(1_900_000)), truncate_prompt_tokens=100)),
    "a chat that is too long": (CHAT, lambda: _body(messages=_chat(texts(_LONG)))),
    "a chat that is cut, and too long": (
        CHAT,
        lambda: _body(messages=_chat(texts(_LONG)), truncate_prompt_tokens=100),
    ),
    "a chat with one wide letter": (CHAT, lambda: _body(messages=_chat(texts(_LONG - 100) + "\U0001f600"))),
    "a chat of escapes": (CHAT, lambda: _body(ensure_ascii=True, messages=_chat("\U0001f600" * (_LONG // 12)))),
    "a text that is cut": (TEXT, lambda: _body(prompt=texts(_CUT), truncate_prompt_tokens=-1)),
    "wide letters that are cut": (TEXT, lambda: _body(prompt="\U0001f600" * (_LONG // 4), truncate_prompt_tokens=-1)),
    "one word that is cut": (TEXT, lambda: _body(prompt="e" * _CUT, truncate_prompt_tokens=-1)),
    # The last is too long, so that all are tokenized and nothing is queued.
    "many texts": (TEXT, lambda: _body(prompt=[texts(3_000)] * 127 + [texts(_LONG - 500_000)])),
    "token ids": (TEXT, lambda: _body(prompt=_ids(390_000))),
    "inputs": (EMBEDDINGS, lambda: _body(input=[texts(600)] * 2047 + [texts(_LONG - 1_500_000)])),
    "inputs of token ids": (EMBEDDINGS, lambda: _body(input=[_ids(150)] * 2047 + [_ids(40_000)])),
    "a response": ("/v1/responses", lambda: _body(input=texts(_LONG), store=False)),
    "a response that is cut": (
        "/v1/responses",
        lambda: _body(input=[*_chat(texts(1_900_000)), *_chat("Hi")], truncation="auto", store=False),
    ),
    "a message": ("/v1/messages", lambda: _body(messages=_chat(texts(_LONG)))),
    "a message to count": ("/v1/messages/count_tokens", lambda: _body(messages=_chat(texts(1_900_000)))),
    "a text to tokenize": ("/tokenize", lambda: _body(prompt=texts(_LONG))),
    "a text that is tokenized": ("/tokenize", lambda: _body(prompt=texts(380_000), return_token_strs=True)),
    "tokens": ("/detokenize", lambda: _body(tokens=_ids(390_000))),
    "a field of no meaning": (TEXT, lambda: _body(prompt="Hi", x="\U0001f600" + "x" * (_LONG - 100))),
    "blanks": (TEXT, lambda: b" " * MAX_BYTES),
    "brackets": (TEXT, lambda: b"[" * MAX_BYTES),
}


class Sizes(NamedTuple):
    """Of a process and its children, in bytes, at most and now."""

    peak: int
    now: int


class MeasuredRouter:
    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url

    def sizes(self) -> Sizes:
        each = [_sizes(pid) for pid in (self.pid, *_children(self.pid))]
        return Sizes(sum(size.peak for size in each), sum(size.now for size in each))

    def forget_peaks(self) -> None:
        for pid in (self.pid, *_children(self.pid)):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    async def give(self, client: httpx.AsyncClient, kinds: Mapping[str, tuple[str, bytes]]) -> dict[str, int]:
        """All at once, each with its status."""

        async def one(path: str, body: bytes) -> int:
            reply = await client.post(self.url + path, content=body, headers={"content-type": "application/json"})
            return reply.status_code

        return dict(zip(kinds, await asyncio.gather(*(one(*each) for each in kinds.values())), strict=True))


@contextlib.asynccontextmanager
async def measured_router(
    server: NatsServer, folder: Path, card: ModelCard = CARD, **settings: object
) -> AsyncIterator[MeasuredRouter]:
    """A router as a process, with one worker that answers everything."""
    deployment = Deployment(server, folder)
    bus = await NatsBus.connect(server.url, name="worker", on_closed=lambda: None)
    worker = ScriptedWorker(bus, says("ok"), card.model)
    worker.pull_timeout_s = 0.5
    working: asyncio.Task[None] | None = None
    try:
        await store_card(bus, card)
        url = await deployment.router("router-1", **settings)
        await _until_ready(url)
        working = asyncio.create_task(worker.run())
        yield MeasuredRouter(deployment.processes["router-1"].pid, url)
    finally:
        if working is not None:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await deployment.close()
        await bus.close()


async def _until_ready(url: str) -> None:
    ends_at = time.monotonic() + 60.0
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < ends_at:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url + "/v1/models")).json()["data"]:
                    return
            await asyncio.sleep(0.1)
    raise AssertionError("the router never knew its model")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _sizes(pid: int) -> Sizes:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return Sizes(*(1024 * int(values[name][0]) for name in ("VmHWM", "VmRSS")))
