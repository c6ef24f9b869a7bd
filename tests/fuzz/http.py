"""Every route of a running router that takes a body, whatever endpoints there are."""

import json
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx

from headrace_router.settings import RouterSettings
from tests.fuzz.bodies import CHATS, TEXTS
from tests.fuzz.fuzzing import MAX_FAILURES, MAX_INPUT_BYTES, SLOW_S, Failure, Findings
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.router.support import make_card, running_router, says

TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
OTHERS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "prompt": "a", "add_special_tokens": True},
    {"model": "tiny", "tokens": [1, 2, 3]},
    {"model": "tiny", "input": "a", "instructions": "b", "max_output_tokens": 3, "stream": True, "store": False},
    {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "temperature": 1},
    {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 4},
    {
        "model": "tiny",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
    },
    {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    {"lora_name": "x", "lora_path": "../../etc"},
)
"""Of other endpoints, where they are there; elsewhere they are merely odd."""
BODIES = [{**body, "n": 1} if "n" in body else body for body in (*CHATS, *TEXTS, *OTHERS)]
SEEDS: Sequence[bytes] = [json.dumps(body).encode() for body in BODIES]
TYPES = (*["application/json"] * 4, "multipart/form-data; boundary=x", "text/plain", "")


async def fuzz_http(random: Random, num_runs: int, findings: Findings) -> None:
    """A status of 500 is a failure, and so is a connection that breaks."""
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0)
    async with running_router(says("ok"), settings=settings, card=make_card(context=4096)) as router:
        routes = await _routes(router.client)
        for _ in range(num_runs):
            path = random.choice(routes)
            data = random.choice(SEEDS)
            for _ in range(random.choice((0, 1, 1, 2))):
                data = random.choice((mutate_json, mutate_json, mutate_bytes))(random, data)[:MAX_INPUT_BYTES]
            await _send(router.client, path, data, random.choice(TYPES), findings)


async def _routes(client: httpx.AsyncClient) -> list[str]:
    paths = (await client.get("/openapi.json")).json()["paths"]
    return sorted(path.replace("{", "").replace("}", "") for path, methods in paths.items() if "post" in methods)


# The scripted worker says tokens, and no embeddings.
async def _send(client: httpx.AsyncClient, path: str, data: bytes, kind: str, findings: Findings) -> None:
    name, started_at, problem = f"http: {path}", time.perf_counter(), ""
    try:
        reply = await client.post(path, content=data, headers={"content-type": kind} if kind else {})
        status = reply.status_code
        findings.num_accepted[name] += status < 400
        if status >= 500 and status != 503 and not (path == "/v1/embeddings" and "tokens_lost" in reply.text):
            problem = f"status {status}"
    except httpx.TransportError as error:
        problem = f"{type(error).__name__}: {error}"
    elapsed_s = time.perf_counter() - started_at
    findings.num_runs[name] += 1
    findings.slowest_s[name] = max(elapsed_s, findings.slowest_s.get(name, 0.0))
    if not problem and elapsed_s > 2 * SLOW_S:
        problem = f"took {elapsed_s:.1f} s"
    if problem and len(findings.failures) < MAX_FAILURES:
        findings.failures.append(Failure(name, problem, data))
