"""A form that turns out to be too complex in the middle of an answer: whose fault it is, and what each API says."""

import json
from typing import Any

import pytest

from headrace_router.grammar_checks import GrammarChecks
from headrace_router.structured_output import OutputForm
from headrace_shared.errors import GRAMMAR_TOO_COMPLEX
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Outcome, Request
from tests.byte_model import MODEL, byte_ids, make_card
from tests.router.support import ScriptedWorker, running_router, sse_events

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
SAID = [{"role": "user", "content": "Hi"}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ASKED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": SAID, "response_format": JSON_SCHEMA}, "response_format.json_schema.schema"),
    (CHAT, {"messages": SAID, "structured_outputs": {"regex": "a+"}, "n": 2}, "structured_outputs.regex"),
    (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}, "tools"),
    (TEXT, {"prompt": "Hi", "ebnf": "root ::= A"}, "ebnf"),
    (
        RESPONSES,
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "text.format.schema",
    ),
]


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(self: GrammarChecks, card: ModelCard, form: OutputForm, owner: str = "") -> str:
        return "a grammar"

    monkeypatch.setattr(GrammarChecks, "check", check)


async def explodes(worker: ScriptedWorker, request: Request) -> None:
    worker.frame(request, byte_ids('{"a'), 0)
    await worker.end(request, Outcome.FAILED, GRAMMAR_TOO_COMPLEX, "The form became too complex.")


async def test_it_is_the_clients_fault_and_names_the_field() -> None:
    async with running_router(explodes, card=make_card(context=4000)) as router:
        for path, fields, param in ASKED:
            reply = await router.client.post(path, json={"model": MODEL, **fields})
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert (error["type"], error["code"], error["param"]) == (
                "invalid_request_error",
                "grammar_too_complex",
                param,
            )
            assert f"'{param}'" in error["message"] and "too complex" in error["message"]
            assert set(error) >= {"message", "type", "param", "code"}
        metrics = (await router.client.get("/metrics")).text
        told = [line for line in metrics.splitlines() if line.startswith("headrace_calls_total")]
        assert len(told) == 1 and 'outcome="error"' in told[0] and told[0].endswith(f" {len(ASKED)}.0"), told


async def test_in_a_stream_it_is_the_error_event() -> None:
    async with running_router(explodes, card=make_card(context=4000)) as router:
        for path, fields, param in ASKED:
            reply = await router.client.post(path, json={"model": MODEL, "stream": True, **fields})
            assert reply.status_code == 200
            if path == RESPONSES:
                blocks = [block for block in reply.text.split("\n\n") if block.startswith("event: ")]
                told, failed = (json.loads(block.split("\ndata: ", 1)[1]) for block in blocks[-2:])
                assert (told["type"], told["code"], told["param"]) == ("error", "grammar_too_complex", param)
                assert failed["response"]["status"] == "failed"
                assert failed["response"]["error"]["code"] == "invalid_prompt"
                continue
            *chunks, last, done = sse_events(reply.text)
            assert done == "[DONE]" and chunks
            assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
            error = last["error"]
            assert (error["type"], error["code"], error["param"]) == (
                "invalid_request_error",
                "grammar_too_complex",
                param,
            )


async def test_in_the_words_of_messages() -> None:
    fields = {
        "model": MODEL,
        "max_tokens": 50,
        "messages": SAID,
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    }
    async with running_router(explodes, card=make_card(context=4000)) as router:
        reply = await router.client.post(MESSAGES, json=fields)
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        assert "'tools'" in reply.json()["error"]["message"]
        streamed = await router.client.post(MESSAGES, json={**fields, "stream": True})
        last = json.loads(streamed.text.rstrip("\n").split("\n\n")[-1].split("\ndata: ", 1)[1])
        assert last["type"] == "error" and last["error"]["type"] == "invalid_request_error"
