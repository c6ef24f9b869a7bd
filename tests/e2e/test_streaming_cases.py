"""Text comes whole, the same streamed or not, on both endpoints."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.api import CHAT, WAYS, Answer, ask, body_of
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

UNICODE = "안녕하세요 🦉 ř 👨‍👩‍👦"
OWL = "🦉".encode()


@pytest.fixture
async def client(scripted: Launched) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scripted.url, timeout=30) as client:
        yield client


async def ask_all_ways(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> list[Answer]:
    return [await ask(client, path, prompt, stream, **fields) for path, stream in WAYS]


async def test_no_character_is_lost_between_tokens(client: httpx.AsyncClient) -> None:
    """One token a byte."""
    for answer in await ask_all_ways(client, {"text": UNICODE}, max_tokens=100):
        assert answer.outcome() == {0: (UNICODE, "stop")}
        assert not any("\ufffd" in delta for delta in answer.deltas)
        assert answer.usage is not None and answer.usage["completion_tokens"] == len(UNICODE.encode()) + 1


@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_limit_in_the_middle_of_a_character(client: httpx.AsyncClient, logprobs: bool) -> None:
    """An emoji is four tokens. What is left of it is one U+FFFD, in both modes."""
    for max_tokens in (1, 2, 3, 4):
        for path, stream in WAYS:
            fields: dict[str, Any] = {"max_tokens": max_tokens}
            if logprobs:
                fields["logprobs"] = True if path == CHAT else 1
            answer = await ask(client, path, {"text": "🦉🦉"}, stream, **fields)
            assert answer.outcome() == {0: ("🦉" if max_tokens == 4 else "\ufffd", "length")}
            assert answer.usage is not None and answer.usage["completion_tokens"] == max_tokens
            told = answer.choices[0].logprobs
            assert len(told) == (max_tokens if logprobs else 0)
            if logprobs and path == CHAT:
                assert bytes(byte for token in told for byte in token["bytes"]) == OWL[:max_tokens]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "finish"),
    [
        (["t", "wo", " th", "ree"], ["two three"], "", "stop"),
        (["t", "wo"], ["two three"], "two", "stop"),
        (["win", "ter", " time"], ["ter time"], "win", "stop"),
        (["win", "ter", " time", "t"], ["no such"], "winter timet", "stop"),
    ],
)
async def test_stop_strings_over_several_tokens(
    client: httpx.AsyncClient, pieces: list[str], stop: list[str], text: str, finish: str
) -> None:
    """Nothing of a stop string is shown, and nothing that only began like one is lost."""
    for answer in await ask_all_ways(client, {"pieces": pieces}, stop=stop, max_tokens=20):
        assert answer.outcome() == {0: (text, finish)}


async def test_nothing_is_told_of_a_character_that_a_stop_string_takes(client: httpx.AsyncClient) -> None:
    """One token a byte: its first bytes come before anybody knows which character it will be."""
    for path, stream in WAYS:
        logprobs: Any = True if path == CHAT else 1
        answer = await ask(client, path, {"text": "é🦉🦊"}, stream, stop=["🦊"], logprobs=logprobs, max_tokens=50)
        assert answer.outcome() == {0: ("é🦉", "stop")}
        assert len(answer.choices[0].logprobs) == len("é🦉".encode())


async def test_only_a_possible_beginning_of_a_stop_string_is_delayed(client: httpx.AsyncClient) -> None:
    for path, stream in WAYS:
        if stream:
            answer = await ask(client, path, {"pieces": ["win", "win", "t", "wo"]}, True, stop=["tw"])
            assert answer.deltas == ["win", "win"]


async def test_usage_comes_once_at_the_end_and_only_on_demand(client: httpx.AsyncClient) -> None:
    for path, stream in WAYS:
        if not stream:
            reply = await client.post(path, json=body_of(path, {"text": "abc"}, stream_options={"include_usage": True}))
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream_options"
            continue
        whole = await ask(client, path, {"text": "abc"})
        for options in ({"include_usage": True}, {}, None):
            body = body_of(path, {"text": "abc"}, True, stream_options=options)
            reply = await client.post(path, json=body)
            events = [httpx.Response(200, content=line[6:]).json() for line in reply.text.split("\n\n")[:-2]]
            if options:
                assert all(event["usage"] is None for event in events[:-1])
                assert events[-1]["choices"] == []
                usage = events[-1]["usage"]
                assert whole.usage is not None
                for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
                    assert usage[key] == whole.usage[key]
            else:
                assert all("usage" not in event and event["choices"] for event in events)


async def test_each_choice_ends_for_itself(client: httpx.AsyncClient) -> None:
    """Four choices, one of which a stop string ends early."""
    script = {"choices": ["abcdefgh", "ab", "xyz stop it", "🦉"]}
    for answer in await ask_all_ways(client, script, n=4, stop=["stop"], max_tokens=40):
        assert answer.outcome() == {0: ("abcdefgh", "stop"), 1: ("ab", "stop"), 2: ("xyz ", "stop"), 3: ("🦉", "stop")}
        assert all(choice.num_finishes == 1 for choice in answer.choices.values())
        assert answer.usage is not None and answer.usage["completion_tokens"] == 9 + 3 + 8 + 5
