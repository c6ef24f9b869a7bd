"""Parameters that say how a call is handled and how its answer is written, through a serving router."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace_router.choices import TokenText
from headrace_router.detokenization import build_vocabulary
from headrace_router.logprob_objects import LogprobWriter
from headrace_router.tokenization import TextEncoder
from headrace_shared.codec import unpack_ids
from headrace_shared.messages import FinishReason, Lane, Request, TokenLogprobs, TopLogprob
from headrace_shared.subjects import REQUESTS
from tests.byte_model import CHATML, CONTEXT, END, MODEL, byte_ids, byte_level_tokenizer, make_card
from tests.router.scripts import scored
from tests.router.support import MESSAGES, Router, ScriptedWorker, prompt_of, running_router, says, sse_events, until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 20}
TOKENIZER = byte_level_tokenizer()


async def post(router: Router, path: str, **fields: Any) -> Any:
    reply = await router.client.post(path, json={**BODY, "messages": MESSAGES, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def by_frames(*sizes: int) -> Any:
    """A frame of so many tokens each, told one after the other."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        index = 0
        for number, size in enumerate(sizes):
            finish = FinishReason.LENGTH if number == len(sizes) - 1 else None
            worker.frame(request, byte_ids("abcdefghijklmnopqrstuvwxyz"[index : index + size]), index, finish=finish)
            index += size
            await asyncio.sleep(0.02)

    return script


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_chunk_of_a_stream_has_as_many_tokens_as_its_client_wants(path: str) -> None:
    async with running_router(by_frames(*[1] * 12)) as router:
        for interval, lengths in ((1, [1] * 12), (4, [1, 4, 4, 3]), (50, [1, 11])):
            body = {**BODY, "messages": MESSAGES, "stream": True, "stream_interval": interval}
            reply = await router.client.post(path, json=body)
            choices = [event["choices"][0] for event in sse_events(reply.text)[:-1]]
            texts = [choice["text"] if path == TEXT else choice["delta"].get("content", "") for choice in choices]
            assert [len(text) for text in texts] == lengths
            assert "".join(texts) == "abcdefghijkl" and choices[-1]["finish_reason"] == "length"


async def test_a_resumed_stream_continues_behind_what_was_told_whatever_the_interval() -> None:
    async with running_router(by_frames(*[1] * 10)) as router:
        body = {**BODY, "stream": True, "stream_interval": 3}
        reply = await router.client.post(TEXT, json=body, headers={"Headrace-Resumable": "true"})
        held = reply.headers["headrace-request-id"]
        tag = held[:8]
        for told in range(10):
            rest = await router.client.get(f"/v1/requests/{held}", headers={"Last-Event-ID": f"{tag}.{told}"})
            events = [block.split("\n")[-1] for block in rest.text.split("\n\n") if block.startswith("id:")]
            decoded = sse_events("\n\n".join(events))
            assert "".join(event["choices"][0]["text"] for event in decoded) == "abcdefghij"[told:]


async def test_the_answer_tells_the_service_tier_that_was_given() -> None:
    async with running_router(says("ok")) as router:
        assert "service_tier" not in await post(router, CHAT)
        for asked in ("auto", "default", "priority", "fast", "scale"):
            assert (await post(router, CHAT, service_tier=asked))["service_tier"] == "default"
        assert router.worker.requests[-1].lane is Lane.INTERACTIVE
        reply = await router.client.post(CHAT, json={**BODY, "messages": MESSAGES, "service_tier": "best"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "service_tier"


async def test_the_flexible_tier_waits_in_the_batch_lane() -> None:
    async with running_router(says("ok"), has_worker=False) as router:
        asking = asyncio.create_task(
            router.client.post(TEXT, json={**BODY, "service_tier": "flex"}, headers={"Headrace-Timeout": "1"})
        )
        await asyncio.sleep(0.3)
        stored = [message for stream in router.broker.streams.values() for message, _ in stream.stored.values()]
        assert any("batch" in message.subject for message in stored)
        await asking


async def test_effort_of_reasoning_is_told_to_the_template() -> None:
    template = CHATML + "{% if enable_thinking is defined %}[{{ enable_thinking }} {{ reasoning_effort }}]{% endif %}"
    async with running_router(says("ok"), card=make_card(chat_template=template)) as router:

        async def end_of_prompt(**fields: Any) -> str:
            await post(router, CHAT, **fields)
            return TOKENIZER.decode(prompt_of(router.worker.requests[-1])).rsplit("\n", 1)[-1]

        assert await end_of_prompt() == ""
        assert await end_of_prompt(reasoning_effort="high") == "[True high]"
        assert await end_of_prompt(reasoning_effort="none") == "[False none]"
        by_name = {"enable_thinking": False}
        assert await end_of_prompt(reasoning_effort="low", chat_template_kwargs=by_name) == "[False low]"


async def test_reasoning_of_earlier_turns_reaches_the_template_under_both_names() -> None:
    template = "{% for m in messages %}<{{ m.reasoning_content or '-' }}|{{ m.content }}>{% endfor %}"
    async with running_router(says("ok"), card=make_card(chat_template=template)) as router:
        for name in ("reasoning", "reasoning_content"):
            turn = {"role": "assistant", "content": "4", name: "2 + 2"}
            await post(router, CHAT, messages=[*MESSAGES, turn, {"role": "user", "content": "?"}])
            assert TOKENIZER.decode(prompt_of(router.worker.requests[-1])) == "<-|Hi><2 + 2|4><-|?>"


async def test_rules_about_tokens_reach_the_worker_as_ids() -> None:
    async with running_router(says("ok")) as router:
        await post(
            router,
            TEXT,
            bad_words=["the", "in her"],
            allowed_token_ids=[9, 4, 4],
            logprobs=1,
            logprob_token_ids=[7, 7, 3],
        )
        sampling = router.worker.requests[-1].sampling
        assert list(unpack_ids(sampling.allowed_token_ids)) == [4, 9]
        assert sampling.logprob_token_ids == (7, 3)
        expected = {tuple(TOKENIZER.encode(text).ids) for text in ("the", " the", "in her", " in her")}
        assert set(sampling.bad_words) == expected


async def test_fields_of_other_apis_that_change_nothing_are_accepted() -> None:
    async with running_router(says("ok")) as router:
        body = {
            **BODY,
            "messages": MESSAGES,
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "auto", "ttl": "30m"},
            "prompt_cache_retention": "24h",
            "session_id": "s",
            "request_id": "r",
            "priority": 0,
            "stream": True,
            "stream_options": {"include_obfuscation": True},
        }
        for path in (TEXT, CHAT):
            assert (await router.client.post(path, json=body)).status_code == 200


async def test_equal_cache_keys_meet_the_same_queue() -> None:
    async with running_router(says("ok"), has_worker=False) as router:
        subjects = set()
        for number in range(6):
            num_before = len(_queued(router))
            body = {**BODY, "prompt": f"{number} different", "prompt_cache_key": "same"}
            asking = asyncio.create_task(router.client.post(TEXT, json=body))
            await until(lambda: len(_queued(router)) > num_before)  # noqa: B023 - awaited at once
            subjects.add(_queued(router)[-1])
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert len(subjects) == 1


def _queued(router: Router) -> list[str]:
    """Subjects, in the order in which they came."""
    stored = router.broker.streams[REQUESTS].stored
    return [message.subject for _, (message, _) in sorted(stored.items())]


async def test_a_chat_is_tokenized_as_a_call_would_be() -> None:
    async with running_router(says("ok")) as router:
        for fields in (
            {},
            {"add_generation_prompt": False},
            {"messages": [*MESSAGES, {"role": "assistant", "content": "Well"}], "continue_final_message": True},
        ):
            await post(router, CHAT, **fields)
            body = {"model": MODEL, "messages": MESSAGES, **fields}
            reply = (await router.client.post("/tokenize", json=body)).json()
            assert reply["tokens"] == prompt_of(router.worker.requests[-1])
            assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == CONTEXT
        body = {"model": MODEL, "prompt": "the 🦉", "return_token_strs": True}
        reply = (await router.client.post("/tokenize", json=body)).json()
        assert reply["token_strs"] == [TOKENIZER.id_to_token(token) for token in reply["tokens"]]
        for wrong, param in (
            ({"messages": MESSAGES, "prompt": "x"}, "messages"),
            ({}, "prompt"),
            ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
            ({"messages": []}, "messages"),
        ):
            refused = await router.client.post("/tokenize", json={"model": MODEL, **wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        longest = await router.client.post("/detokenize", json={"model": MODEL, "tokens": [5] * CONTEXT})
        assert longest.status_code == 200
        refused = await router.client.post("/detokenize", json={"model": MODEL, "tokens": [5] * (CONTEXT + 1)})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"
        refused = await router.client.post("/detokenize", json={"model": MODEL, "tokens": [5, -1]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


async def test_long_prompts_are_shown_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    names_of, decode = TextEncoder.names_of, TextEncoder.decode

    def noted(work: Callable[[TextEncoder, Sequence[int]], Any]) -> Any:
        def run(self: TextEncoder, ids: Sequence[int]) -> Any:
            threads.append(threading.get_ident())
            return work(self, ids)

        return run

    monkeypatch.setattr(TextEncoder, "names_of", noted(names_of))
    monkeypatch.setattr(TextEncoder, "decode", noted(decode))
    async with running_router(says("x")) as router:
        body = {"model": MODEL, "prompt": "abc", "return_token_strs": True}
        assert (await router.client.post("/tokenize", json=body)).json()["token_strs"] == ["a", "b", "c"]
        assert (await router.client.post(f"{TEXT}/render", json=BODY)).status_code == 200
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_a_rendered_call_is_what_would_be_queued() -> None:
    async with running_router(scored) as router:
        fields = {"temperature": 0.5, "seed": 5, "stop": ["x"], "bad_words": ["the"], "prompt_logprobs": 1}
        await post(router, CHAT, **fields)
        request = router.worker.requests[-1]
        body = {**BODY, "messages": MESSAGES, **fields}
        rendered = (await router.client.post(f"{CHAT}/render", json=body)).json()
        assert rendered["token_ids"] == prompt_of(request)
        assert rendered["prompt"] == TOKENIZER.decode(prompt_of(request), skip_special_tokens=False)
        told = rendered["sampling_params"]
        assert (told["seed"], told["temperature"], told["stop"]) == (5, 0.5, ["x"])
        assert told["bad_words_token_ids"] == [list(word) for word in request.sampling.bad_words]
        several = (await router.client.post(f"{TEXT}/render", json={**BODY, "prompt": [[7], [5, 6]]})).json()
        assert [each["token_ids"] for each in several] == [[7], [5, 6]]
        num_queued = len(router.worker.requests)
        refused = await router.client.post(f"{TEXT}/render", json={**BODY, "temperature": 9})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
        assert len(router.worker.requests) == num_queued, "nothing is generated"


def test_only_half_a_character_is_named_by_its_likelier_token() -> None:
    """Tokens whose texts are equal share a key of the legacy shape: the value is the likelier one's."""
    halves = byte_ids("🦉")[:2]
    top = tuple(TopLogprob(token, -1.0 - place) for place, token in enumerate(halves))
    writer = LogprobWriter(build_vocabulary(TOKENIZER.to_str().encode()), 2)
    told = writer.of_completion([TokenText(END, 0, TokenLogprobs(-3.0, top))])
    assert told.top_logprobs == [{"\ufffd": -1.0, "<|im_end|>": -3.0}]
