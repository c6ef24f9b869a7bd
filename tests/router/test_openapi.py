"""The API's description is true: of every route, body, bound, answer and error."""

import asyncio
import contextlib
import copy
import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Config, GenerationMode
from schemathesis.core.result import Ok

from headrace_router.call_options import LANE
from headrace_router.openapi import BODIES
from headrace_router.parsing import parse_body
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.validation import validate_chat, validate_completion
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import Lane
from headrace_shared.subjects import ADAPTERS
from headrace_shared.tasks import end
from tests.byte_model import MODEL, make_card
from tests.router.keys import add_key, strict_router, until_known
from tests.router.scripts import scored_or_embedded
from tests.router.support import ScriptedWorker, running_router, says
from tests.router.test_adapters import Loader

CARD = make_card(context=100_000)
MESSAGES = [{"role": "user", "content": "Hi"}]
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "logprob_token_ids": {"logprobs": True},
    "min_tokens": {"max_tokens": 50},
}
"""What a field needs beside it."""
NUM_CALLS = 4
"""Valid ones of each route, and as many that are not."""
BOUNDS = {"minimum": -1, "maximum": 1, "exclusiveMinimum": -1}


def valid(kind: type[GenerationBody], **fields: Any) -> None:
    """Raises InvalidRequest."""
    if kind is ChatBody:
        body = json.dumps({"model": MODEL, "messages": MESSAGES, **fields}).encode()
        validate_chat(parse_body(ChatBody, body), CARD, 1)
    else:
        body = json.dumps({"model": MODEL, "prompt": "Hi", **fields}).encode()
        validate_completion(parse_body(CompletionBody, body), CARD, 1)


def properties(kind: type[GenerationBody]) -> dict[str, Any]:
    found: dict[str, Any] = kind.model_json_schema()["properties"]
    return found


def numbers(kind: type[GenerationBody]) -> list[tuple[str, str, float, bool]]:
    """(field, bound, its value, whether it is one of whole numbers)"""
    found = []
    for field, schema in properties(kind).items():
        is_whole = any(each.get("type") == "integer" for each in schema.get("anyOf", [schema]))
        found += [(field, bound, schema[bound], is_whole) for bound in BOUNDS if bound in schema]
    return found


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_the_bounds_of_numbers_are_those_that_are_kept(kind: type[GenerationBody]) -> None:
    assert len(numbers(kind)) > 25
    for field, bound, value, is_whole in numbers(kind):
        beside = COMPANIONS.get(field, {}) if kind is ChatBody or field == "min_tokens" else {"logprobs": 1}
        beside = {name: other for name, other in beside.items() if name != field}
        beyond = value + BOUNDS[bound] * (1 if is_whole else 0.001)
        if bound == "exclusiveMinimum":
            beyond, value = value, value + 0.001
        zero_needs_echo = field == "max_tokens" and value == 0
        if not (zero_needs_echo and kind is ChatBody):
            valid(kind, **{**beside, field: value, **({"echo": True} if zero_needs_echo else {})})
        with pytest.raises(InvalidRequest) as caught:
            valid(kind, **{**beside, field: beyond})
        assert caught.value.param == field, (field, bound)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_the_bounds_of_lengths_are_those_that_are_kept(kind: type[GenerationBody]) -> None:
    num_checked = 0
    for field, schema in properties(kind).items():
        given: list[tuple[Any, Any]] = []
        is_text = any(each.get("items", {}).get("type") == "string" for each in schema.get("anyOf", [schema]))
        if "maxItems" in schema:
            item = "a" if is_text else 1
            given.append(([item] * schema["maxItems"], [item] * (schema["maxItems"] + 1)))
        if "maxLength" in schema:
            given.append(("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)))
        if "minLength" in schema:
            given.append(("a" * schema["minLength"], ""))
        if "minItems" in schema and field not in ("messages", "prompt"):
            given.append(([1] * schema["minItems"], []))
        if "maxProperties" in schema:
            many = {str(token): 1 for token in range(schema["maxProperties"] + 1)}
            given.append(({"1": 1}, many))
        if "enum" in schema:
            given += [(value, "something else") for value in schema["enum"]]
        beside = COMPANIONS.get(field, {}) if kind is ChatBody else {"logprobs": 1}
        for within, beyond in given:
            valid(kind, **{**beside, field: within})
            with pytest.raises(InvalidRequest) as caught:
                valid(kind, **{**beside, field: beyond})
            assert caught.value.param == field
            num_checked += 1
    assert num_checked > 20


def wrong_values(schema: dict[str, Any]) -> list[Any]:
    """Of another type than any that the schema has."""
    kinds = {each.get("type", "object") for each in schema.get("anyOf", [schema])}
    candidates = {"string": "x", "boolean": True, "array": [{}], "object": {"a": object}, "number": 1.5}
    wrong: list[Any] = [value for kind, value in candidates.items() if kind not in kinds and kind != "object"]
    if "number" not in kinds and "integer" not in kinds:
        wrong.append(5)
    if "number" in kinds and 1.5 in wrong:
        wrong.remove(1.5)
    return [value for value in wrong if not (value == "x" and "object" in kinds and "string" in kinds)]


async def test_no_wrong_value_reaches_the_engine_or_breaks_anything() -> None:
    """Through the door: a 4xx that names the field, whatever the field and the endpoint."""
    async with running_router(says("ok")) as router:
        asked: list[tuple[str, dict[str, Any], str]] = []
        for kind, path in ((ChatBody, "/v1/chat/completions"), (CompletionBody, "/v1/completions")):
            for field, schema in properties(kind).items():
                values: list[Any] = wrong_values(schema)
                for bound, sign in BOUNDS.items():
                    if bound in schema:
                        values += [schema[bound] + sign * (0 if bound == "exclusiveMinimum" else 1), sign * 10**30]
                asked += [(path, {field: value}, field) for value in values]
        assert len(asked) > 250
        base = {"model": MODEL, "messages": MESSAGES, "prompt": "Hi"}
        for path, fields, field in asked:
            reply = await router.client.post(path, json={**base, **fields})
            assert 400 <= reply.status_code < 500, (path, fields, reply.text)
            error = reply.json()["error"]
            assert (error["param"] or "").split("[")[0].split(".")[0] == field, (path, fields, error)
            assert len(error["message"]) < 500
        assert router.worker.requests == []
        assert (await router.client.post("/v1/completions", json=base)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 128, "n": 3}, "n"),
        ({"n": 17}, "n"),
        ({"prompt": [[1] * 200] * 128, "prompt_logprobs": 20}, "prompt"),
        ({"max_tokens": 10**9}, "max_tokens"),
    ],
)
async def test_a_call_that_fans_out_too_far_costs_nothing(fields: dict[str, Any], param: str) -> None:
    async with running_router(says("ok")) as router:
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", **fields})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        assert router.worker.requests == [] and (await router.client.get("/load")).json() == {"server_load": 0}


async def test_every_route_is_described() -> None:
    async with running_router(says("ok")) as router:
        document = (await router.client.get("/openapi.json")).json()
        described = [(path, method, each) for path, item in document["paths"].items() for method, each in item.items()]
        assert len(described) > 15
        for path, method, each in described:
            if path == "/" or path.startswith("/dashboard"):
                continue  # pages, and what they show
            assert "security" in each, f"{method} {path} says nothing of itself"
            assert "200" in each["responses"] and "500" in each["responses"], path
            if method == "post" and not path.endswith("/cancel"):
                assert each["requestBody"]["content"], path
        assert {body.__name__ for body in BODIES} <= set(document["components"]["schemas"])


@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing() -> None:
    """Valid and invalid calls made from the description, to a router that serves: see `_explore`."""
    async with strict_router(scored_or_embedded, dashboard=False) as router:
        headers = await add_key(router.bus, is_admin=True)
        await until_known(router, headers)
        await router.worker.bus.ensure_bucket(ADAPTERS)
        document = (await router.client.get("/openapi.json", headers=headers)).json()
        patient = ScriptedWorker(router.worker.bus, scored_or_embedded, lane=Lane.BATCH)
        for serving in (router, router._replace(worker=patient)):
            # Both speak for the same worker.
            await router.worker.bus.watch(ADAPTERS.name, Loader(serving).on_change)
        working = asyncio.create_task(patient.run())
        try:
            await asyncio.to_thread(_explore, document, f"http://127.0.0.1:{router.port}", headers)
        finally:
            await end(working)
        assert (await router.client.get("/health")).status_code == 200
        assert patient.requests and router.worker.requests, "both lanes have had work"


def _explore(document: dict[str, Any], url: str, headers: dict[str, str]) -> None:
    known = copy.deepcopy(document)
    for body in BODIES:
        # Of calls for models that do not exist one is as good as a thousand.
        model = known["components"]["schemas"][body.__name__]["properties"].get("model")
        if model is not None:
            model["enum"] = [MODEL]
    # Few calls made at random are valid: some of them go where nobody would go by chance.
    for parameter in known["paths"]["/v1/embeddings"]["post"]["parameters"]:
        if parameter["name"] == LANE:
            parameter.update(required=True, schema={"type": "string", "enum": ["batch"]})
    known["components"]["schemas"]["LoadAdapterBody"]["properties"]["base_model"]["enum"] = [MODEL, None]
    # What depends on the model, and how fields go together, is not in the description: that may be refused. So may
    # what comes too late, or with a key that stands for something else.
    accepted = {"expected-statuses": ["2xx", "400", "404", "408", "409", "413", "422"]}
    config = Config.from_dict({"checks": {"positive_data_acceptance": accepted}})
    schema = schemathesis.openapi.from_dict(known, config=config)
    bounded = hypothesis_settings(
        max_examples=NUM_CALLS,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    num_operations = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        num_operations += 1
        for mode in GenerationMode:

            @bounded
            @given(operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case[Any]) -> None:
                case.call_and_validate(base_url=url, headers=headers, timeout=20)

            with contextlib.suppress(Unsatisfiable):  # there is nothing to be wrong in
                check()
    assert num_operations > 12
