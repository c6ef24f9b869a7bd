"""Answers in a form that the client asks for, from the real model, through OpenAI's client and without."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from tests.e2e.api import CHAT, MODEL, TEXT, WAYS, ask
from tests.e2e.launcher import Launched, launched

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"


class Person(BaseModel):
    name: Literal["Ada", "Grace", "Barbara"]
    age: int
    languages: list[Literal["ada", "cobol", "clu"]] = Field(max_length=3)  # small models find no end


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    # Drafts on, so that they are checked against grammars as well.
    environment = {"HEADRACE_CONTEXT": "1024", "HEADRACE_DTYPE": "float32", "HEADRACE_SPECULATIVE_TOKENS": "3"}
    with launched(tmp_path_factory.mktemp("forms"), "--no-autoscaler", environment=environment) as system:
        yield system


@pytest.fixture
async def client(system: Launched) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize(("path", "stream"), WAYS)
async def test_every_form_on_both_endpoints_whole_and_streamed(
    client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": DATE}}, DATE),
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "d"'}}, "a[bc]d"),
    ]
    for fields, pattern in forms:
        answer = await ask(client, path, "When was it?", stream, max_tokens=40, seed=3, temperature=1.0, **fields)
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish == "stop"


async def test_openais_client_gets_its_type_back(system: Launched) -> None:
    async with AsyncOpenAI(base_url=system.url + "/v1", api_key="none") as openai:
        parsed = await openai.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Describe a programmer as JSON."}],
            response_format=Person,
            max_completion_tokens=200,
            temperature=0.7,
            seed=5,
        )
        person = parsed.choices[0].message.parsed
        assert person is not None and person.name in ("Ada", "Grace", "Barbara")
        with pytest.raises(BadRequestError) as caught:
            await openai.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi."}],
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}},
            )
        assert caught.value.code == "invalid_json_schema"
        assert caught.value.param == "response_format.json_schema.schema"


async def test_neighbours_with_and_without_forms_do_not_change_each_other(client: httpx.AsyncClient) -> None:
    plain: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    alone = await ask(client, CHAT, "Name three rivers.", **plain)
    formed: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "structured_outputs": {"regex": DATE}}
    date = await ask(client, TEXT, "The first moon landing was on ", **formed)
    answers = await asyncio.gather(
        *(ask(client, CHAT, "Name three rivers.", **plain) for _ in range(3)),
        *(ask(client, TEXT, "The first moon landing was on ", **formed) for _ in range(3)),
    )
    assert [answer.text for answer in answers] == [alone.text] * 3 + [date.text] * 3


async def test_several_choices_and_an_object_that_is_cut(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 1}
    answer = await ask(client, CHAT, "A JSON object about tea.", n=3, max_tokens=30, **fields)
    for choice in answer.choices.values():
        assert choice.text.lstrip().startswith("{")
        if choice.finish == "stop":
            assert isinstance(json.loads(choice.text), dict)
        else:
            assert choice.finish == "length"
