"""What users write, and what models answer, is in no log, metric or file once it is told."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace_shared.codec import pack_ids
from headrace_shared.subjects import CALLS, FLIGHT, TOKENS, bucket_stream
from tests.byte_model import byte_ids
from tests.e2e.api import WAYS, ask, body_of
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

ASKED, ANSWERED = "quincemarmalade", "persimmonjelly"
WRITTEN = ("zanzibaruser", "zanzibarname", "zanzibarmeta", "zanzibarid", "zanzibarmodel", "zanzibarfield")
"""Elsewhere in requests; some of them in such as are refused."""
CALLED = "zanzibarcall"
"""A client's own name for its request, which is logged, so that both sides find the same request."""
KEPT = "tamarindchutney"
"""In stop strings and forms of the answer, which are kept with a call that may be continued, for half an hour."""


def forms_of(word: str) -> list[bytes]:
    """As text, and as token ids, of which prompts and answers have one a byte: packed, or as MessagePack has them."""
    ids = byte_ids(word)
    return [word.encode(), pack_ids(ids), msgspec.msgpack.encode(ids)[1:]]


def files_with(folder: Path, word: str) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_socket():
            data = path.read_bytes()
            if any(form in data for form in forms_of(word)):
                yield str(path.relative_to(folder))


async def ask_everything(client: httpx.AsyncClient) -> None:
    script = {"text": f"It is {ANSWERED}.", "note": ASKED}
    headers = {"X-Request-Id": CALLED, "Idempotency-Key": WRITTEN[3]}
    for number, (path, streamed) in enumerate(WAYS):
        more = {"user": WRITTEN[0], "metadata": {"a": WRITTEN[2]}, "stop": [f"{KEPT}stop"], "max_tokens": 60}
        own = {**headers, "Idempotency-Key": f"{WRITTEN[3]}{number}"}
        answer = await ask(client, path, script, streamed, n=2, logprobs=None, headers=own, **more)
        assert ANSWERED in answer.text
    failing = {**script, "fail_at": 3}
    reply = await client.post("/v1/completions", json=body_of("/v1/completions", failing, max_tokens=20))
    assert reply.status_code == 500
    reply = await client.post(
        "/v1/completions", json=body_of("/v1/completions", script, structured_outputs={"regex": f"({KEPT}"})
    )
    assert reply.status_code == 400
    for bad in (
        {"model": WRITTEN[4]},
        {WRITTEN[5]: 1, "temperature": 99},
        {"prompt": 7, "user": WRITTEN[0]},
        {"logit_bias": {WRITTEN[5]: 1}},
    ):
        reply = await client.post("/v1/completions", json=body_of("/v1/completions", script) | bad)
        assert 400 <= reply.status_code < 500
    # A client that leaves before its answer is there.
    endless = body_of("/v1/completions", {"echo": ANSWERED, "note": ASKED}, True, max_tokens=2000)
    async with client.stream("POST", "/v1/completions", json=endless) as stream:
        async for _ in stream.aiter_bytes():
            break


async def test_nothing_of_prompts_and_answers_is_left_behind(scripted: Launched) -> None:
    async with httpx.AsyncClient(base_url=scripted.url, timeout=60.0, trust_env=False) as client:
        await ask_everything(client)
        for port in {each[kind] for each in scripted.ps() for kind in ("port", "health_port") if each.get(kind)}:
            for path in ("/metrics", "/health", "/version", "/load"):
                try:
                    told = (await client.get(f"http://127.0.0.1:{port}{path}")).text
                except httpx.TransportError:
                    continue  # the broker's own port
                assert not [word for word in (ASKED, ANSWERED, KEPT, *WRITTEN) if word in told], (port, path)
    async with broker_view(scripted) as broker:
        for _ in range(600):
            if await broker.num_queued() == 0:
                break
            await asyncio.sleep(0.1)
        assert await broker.num_queued() == 0
    await asyncio.sleep(1.0)  # the broker takes the last file away
    log = scripted.log.read_text()
    assert not [word for word in (ASKED, ANSWERED, KEPT, *WRITTEN) if word in log]
    for word in (ASKED, ANSWERED, *WRITTEN):
        assert not list(files_with(scripted.data_dir, word)), word
    kept = list(files_with(scripted.data_dir, KEPT))
    assert kept and all(bucket_stream(CALLS.name) in path for path in kept), kept


def test_the_search_would_find_it(tmp_path: Path) -> None:
    for number, form in enumerate(forms_of(ASKED)):
        (tmp_path / f"{number}").write_bytes(b"..." + form)
    assert len(list(files_with(tmp_path, ASKED))) == 3


def test_what_is_kept_for_a_while_is_bounded_in_time() -> None:
    """In the broker's memory: answers, and what schedulers have seen. On disk: how an answer is written."""
    assert TOKENS.in_memory and TOKENS.max_age_s is not None and TOKENS.max_age_s <= 900
    assert FLIGHT.in_memory and FLIGHT.max_age_s is not None and FLIGHT.max_age_s <= 3600
    assert CALLS.ttl_s is not None and CALLS.ttl_s <= 1800
