"""What an answer depends on survives its worker: choices, seeds, penalties, biases, log-probabilities, stop strings.

One worker, which is killed while all answers are half done; its successor goes on with each.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.messages import LogMessage, TokenFrame
from headrace_shared.subjects import TOKENS
from tests.e2e.api import CHAT, TEXT, body_of
from tests.faults.crowd import Call, Crowd
from tests.faults.fleet import Fleet, Shape
from tests.faults.jobs import MODEL
from tests.integration.deployment import until

pytestmark = [pytest.mark.nats, pytest.mark.model, pytest.mark.e2e, pytest.mark.timeout(600)]

SHAPE = Shape(
    MODEL,
    routers=1,
    schedulers=1,
    workers=1,
    worker={"num_threads": 1, "dtype": "float32", "context": 1024, "num_blocks": 1024},
)
STORY = "Once upon a time there was a mill by a river, and"
NUM_TOKENS = 40
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"temperature": 0}),
    "seed": (TEXT, {"temperature": 1, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.02}),
    "choices": (CHAT, {"temperature": 1, "seed": 7, "n": 3}),
    "repetition penalty": (TEXT, {"temperature": 0, "repetition_penalty": 1.3}),
    "presence and frequency": (TEXT, {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.6}),
    "penalties, sampled": (TEXT, {"temperature": 1, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
    "logprobs": (CHAT, {"temperature": 0.7, "seed": 11, "logprobs": True, "top_logprobs": 3}),
    "echo with logprobs": (TEXT, {"temperature": 0, "echo": True, "logprobs": 2}),
    "bad words": (TEXT, {"temperature": 1, "seed": 5, "bad_words": ["mill", " the river", "once upon"]}),
    "few tokens": (TEXT, {"temperature": 1, "seed": 5, "allowed_token_ids": list(range(260, 900))}),
    "bias and min_tokens": (TEXT, {"temperature": 0, "logit_bias": {"28": 3.0}, "min_tokens": 34}),
}


def body(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    path, fields = CASES[name]
    asked = body_of(
        path, STORY, True, max_tokens=NUM_TOKENS, **({} if "min_tokens" in fields else {"ignore_eos": True})
    )
    return path, asked | fields | more


async def attempts(fleet: Fleet) -> dict[str, set[int]]:
    """Of all requests: in which attempts their tokens were made."""
    found: dict[str, set[int]] = {}
    for message in await fleet.client.bus.read(TOKENS.name, "tokens.>", 100_000):
        event: Any = codec.decode(message.data, LogMessage)
        if isinstance(event, TokenFrame):
            found.setdefault(event.request_id, set()).add(event.attempt)
    return found


def usage(call: Call) -> tuple[int, int]:
    told = call.answer.usage
    assert told is not None
    return told["prompt_tokens"], told["completion_tokens"]


def logprobs(call: Call) -> list[float]:
    return [token["logprob"] for choice in call.answer.choices.values() for token in choice.logprobs]


async def test_every_kind_of_answer_goes_on_as_if_nothing_had_happened(nats_server: NatsServer, tmp_path: Path) -> None:
    async with Fleet.of(nats_server, tmp_path, SHAPE) as fleet:
        crowd = Crowd(fleet.urls)
        alone = dict(zip(CASES, await asyncio.gather(*(crowd.ask(*body(name)) for name in CASES)), strict=True))
        # Stop strings that begin before the kill (by far) and end after it, in one choice of three as well.
        wanted = {name: body(name) for name in CASES}
        for name in ("greedy", "choices"):
            text = alone[name].answer.choices[0].text
            wanted[f"{name}, stopped"] = body(name, stop=text[len(text) // 8 : -len(text) // 8])
        again = Crowd(fleet.urls)
        calls = {name: asyncio.create_task(again.ask(*each)) for name, each in wanted.items()}
        await until(lambda: len(again.calls) == len(wanted) and again.num_events > 13 * len(wanted), what="tokens")
        await fleet.kill("worker-1")
        ends = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        seen = await attempts(fleet)
    for name, call in ends.items():
        assert call.is_complete and not call.problem and call.num_connections == 1, (name, call)
        assert call.request_id is not None and seen[call.request_id] == {0, 1}, (name, "was not interrupted")
        if name in CASES:
            assert call.outcome() == alone[name].outcome(), name
            assert usage(call) == usage(alone[name]), name
    assert len(logprobs(ends["logprobs"])) == NUM_TOKENS
    assert logprobs(ends["logprobs"]) == pytest.approx(logprobs(alone["logprobs"]), abs=2e-3)
    echoed, echoed_alone = (calls["echo with logprobs"].answer.choices[0] for calls in (ends, alone))
    assert echoed.text.startswith(STORY) and echoed.logprobs[0] is None
    assert echoed.logprobs[1:] == pytest.approx(echoed_alone.logprobs[1:], abs=2e-3)
    assert "mill" not in ends["bad words"].answer.choices[0].text.lower().split()
    for name in ("greedy", "choices"):
        stop = wanted[f"{name}, stopped"][1]["stop"]
        for index, (text, finish) in alone[name].outcome().items():
            cut = ends[f"{name}, stopped"].outcome()[index]
            assert cut == ((text.split(stop)[0], "stop") if stop in text else (text, finish)), (name, index)
