"""Streams: order, repair, failure, usage, choices, log-probabilities."""

import asyncio
from typing import Any

import pytest

from headrace_router.own_requests import Own, OwnRequests
from headrace_router.settings import RouterSettings
from headrace_shared.bus import Message
from headrace_shared.codec import encode
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import FinishReason, Outcome, Request, TokenFrame
from headrace_shared.subjects import tokens_subject
from tests.byte_model import END, MODEL, byte_ids
from tests.router.support import Router, ScriptedWorker, running_router, says, sse_events

TEXT = "안녕하세요 🦉 ř 👨‍👩‍👦"


async def stream(router: Router, **fields: Any) -> list[Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    reply = await router.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return sse_events(reply.text)


async def whole(router: Router, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
    reply = await router.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def finishes(events: list[Any]) -> list[tuple[int, str]]:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]
    return [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]


async def test_characters_over_several_tokens() -> None:
    async with running_router(says(TEXT)) as router:
        events = await stream(router)
        assert text_of(events) == TEXT
        assert "\ufffd" not in "".join(map(str, events))
        assert (await whole(router))["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_limit_within_a_character(max_tokens: int, logprobs: bool) -> None:
    async with running_router(says("🦉🦉")) as router:
        fields = {"max_tokens": max_tokens, "logprobs": logprobs, "stream_options": {"include_usage": True}}
        events = await stream(router, **fields)
        del fields["stream_options"]
        answer = await whole(router, **fields)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == text_of(events) == ("🦉" if max_tokens == 4 else "\ufffd")
        assert answer["usage"] == events[-2]["usage"]
        assert answer["usage"]["completion_tokens"] == max_tokens
        if logprobs:
            data = [byte for token in choice["logprobs"]["content"] for byte in token["bytes"]]
            assert bytes(data) == "🦉".encode()[:max_tokens]
            streamed = [t for e in events[:-2] for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]


async def test_usage_only_where_asked_for() -> None:
    async with running_router(says("abc")) as router:
        for options in (None, {}, {"include_usage": False}, {"include_obfuscation": False}):
            events = await stream(router, stream_options=options)
            assert all("usage" not in event for event in events[:-1])
            assert all(event["choices"] for event in events[:-1])
        events = await stream(router, stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(counts) and counts[-1] == 4
        assert events[-2]["choices"] == []


async def test_role_comes_once_and_with_the_first_token() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        await asyncio.sleep(0.5)
        await says("abc")(worker, request)

    settings = RouterSettings(port=0, drain_delay_s=0.0, ping_interval_s=0.1)
    async with running_router(script, settings=settings) as router:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        reply = await router.client.post("/v1/chat/completions", json=body)
        blocks = reply.text.split("\n\n")
        assert 3 <= blocks.index(next(block for block in blocks if block.startswith("data: "))) <= 5
        assert not any(blocks[:3])
        deltas = [event["choices"][0]["delta"] for event in sse_events(reply.text)[:-1]]
        assert deltas[0] == {"role": "assistant", "content": "a"}
        assert all("role" not in delta for delta in deltas[1:])


async def test_choices_end_one_by_one() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        texts = ["a", "bcd", "stop it", "ef"]
        for i in range(8):
            for choice, text in enumerate(texts):
                tokens = [*byte_ids(text), END]
                if i < len(tokens):
                    end = FinishReason.STOP if i == len(tokens) - 1 else None
                    worker.frame(request, [tokens[i]], i, choice=choice, finish=end, num_cached=7)
            await asyncio.sleep(0.001)

    async with running_router(script) as router:
        options = {"include_usage": True}
        events = await stream(router, n=4, stop="p i", stream_options=options)
        assert [text_of(events, i) for i in range(4)] == ["a", "bcd", "sto", "ef"]
        assert sorted(finishes(events)) == [(i, "stop") for i in range(4)]
        assert events.count("[DONE]") == 1
        answer = await whole(router, n=4, stop="p i")
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "bcd", "sto", "ef"]
        assert [choice["stop_reason"] for choice in answer["choices"]] == [None, None, "p i", None]
        assert answer["usage"]["completion_tokens"] == 2 + 4 + 6 + 3
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
        assert answer["usage"] == events[-2]["usage"]


async def test_prompts_and_choices_are_numbered_in_order() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        for choice in range(request.num_choices):
            tokens = [request.prompt[0], *byte_ids(str(choice))]
            worker.frame(request, tokens, 0, choice=choice, finish=FinishReason.LENGTH)

    async with running_router(script) as router:
        prompts = [[5], [6], [7]]
        body = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 2}
        answer = (await router.client.post("/v1/completions", json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        first = [chr(33 + prompt[0]) for prompt in prompts for _ in range(2)]
        assert [choice["text"] for choice in answer["choices"]] == [f"{a}{i % 2}" for i, a in enumerate(first)]
        assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 12
        assert len({request.sampling.seed for request in router.worker.requests}) == 3
        await router.client.post("/v1/completions", json={**body, "seed": 7})
        assert {request.sampling.seed for request in router.worker.requests[3:]} == {7}


async def test_repetitions_and_old_attempts_are_dropped() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        tokens = byte_ids("abcdef")
        worker.frame(request, tokens[:3], 0)
        worker.frame(request, tokens[:3], 0)
        worker.frame(request, tokens[1:4], 1, attempt=1)
        worker.frame(request, byte_ids("XYZ"), 4, attempt=0, finish=FinishReason.LENGTH)
        worker.frame(request, tokens[4:], 4, attempt=1, finish=FinishReason.LENGTH)

    async with running_router(script) as router:
        assert text_of(await stream(router)) == "abcdef"


def lose(worker: ScriptedWorker, request: Request, index: int, text: str, finish: FinishReason | None = None) -> None:
    """A frame that is in the log and has reached no subscriber."""
    frame = TokenFrame(
        request_id=request.request_id, choice=0, attempt=0, index=index, tokens=tuple(byte_ids(text)), finish=finish
    )
    assert isinstance(worker.bus, MemoryBus)
    subject = tokens_subject(request.router, request.request_id)
    worker.bus.broker.streams["TOKENS"].append(Message(subject, encode(frame)))


async def test_a_gap_is_repaired_from_the_log_and_is_no_second_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Own] = []

    def started(requests: OwnRequests, own: Own, now: float) -> float:
        begun.append(own)
        return 0.0

    monkeypatch.setattr(OwnRequests, "started", started)

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        lose(worker, request, 2, "c")
        lose(worker, request, 3, "d")
        for i, char in enumerate("ef", start=4):
            worker.frame(request, byte_ids(char), i)
            await asyncio.sleep(0.01)
        lose(worker, request, 6, "g", FinishReason.LENGTH)

    async with running_router(script) as router:
        events = await stream(router)
        assert text_of(events) == "abcdefg"
        assert finishes(events) == [(0, "length")]
    assert len(begun) == 1, "the time of each would be taken for one to the first token"


async def test_lost_last_frames_are_found_when_it_gets_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.watchdog.LOOK_AFTER_S", 0.2)

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        lose(worker, request, 2, "cd", FinishReason.LENGTH)
        await asyncio.sleep(100)

    async with running_router(script) as router:
        assert text_of(await stream(router)) == "abcd"


async def test_a_terminal_event_before_the_last_frame() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, Outcome.FINISHED)
        worker.frame(request, byte_ids("cd"), 2, finish=FinishReason.LENGTH)

    async with running_router(script) as router:
        assert text_of(await stream(router)) == "abcd"


async def test_a_terminal_event_when_an_earlier_attempt_finished_the_choice() -> None:
    """Its frames were no news while a later attempt ran; the log has them, whichever attempt they are of."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        tokens = byte_ids("abcdef")
        worker.frame(request, tokens[:2], 0)
        worker.frame(request, tokens[2:3], 2, attempt=1)
        worker.frame(request, tokens[2:], 2, finish=FinishReason.LENGTH)
        await worker.end(request, Outcome.FINISHED)

    async with running_router(script) as router:
        events = await stream(router)
        assert text_of(events) == "abcdef" and finishes(events) == [(0, "length")]
        assert (await whole(router))["choices"][0]["message"]["content"] == "abcdef"


async def test_a_terminal_event_without_the_last_frame_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.watchdog.LOOK_DELAYS_S", (0.01, 0.01, 0.01))

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)

    async with running_router(script) as router:
        events = await stream(router)
        assert events[-2]["error"]["code"] == "tokens_lost"


async def test_what_cannot_be_repaired_is_an_error_and_no_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_router.watchdog.LOOK_DELAYS_S", (0.01, 0.01, 0.01))

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        worker.frame(request, byte_ids("ef"), 4, finish=FinishReason.LENGTH)

    async with running_router(script) as router:
        events = await stream(router)
        assert text_of(events) == "ab" and finishes(events) == []
        assert events[-2]["error"]["code"] == "tokens_lost"
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [
        (Outcome.FAILED, "engine_error", 500),
        (Outcome.SHED, "", 503),
        (Outcome.EXPIRED, "", 408),
        (Outcome.CANCELLED, "", 500),
    ],
)
async def test_a_failed_request(outcome: Outcome, code: str, status: int) -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.end(request, outcome, code, "It did not work.")

    async with running_router(script) as router:
        events = await stream(router)
        assert text_of(events) == "ab" and finishes(events) == []
        error = events[-2]["error"]
        assert error["message"] == "It did not work."
        assert {"type", "param", "code", "request_id"} <= set(error)
        assert events[-1] == "[DONE]"
        reply = await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        assert reply.status_code == status
        if status == 503:
            assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert router.worker.cancels == []
        metrics = (await router.client.get("/metrics")).text
        assert f'headrace_requests_total{{model="tiny",outcome="{error["code"]}"}} 2.0' in metrics


async def test_an_attempt_that_was_given_up_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as silence: what the log has of it helps, and if that is nothing new, the call ends."""
    monkeypatch.setattr("headrace_router.watchdog.LOOK_AFTER_S", 0.2)

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0, attempt=2)
        await worker.lose(request)
        while True:
            worker.frame(request, byte_ids("abcd"), 0, attempt=1)
            await asyncio.sleep(0.02)

    settings = RouterSettings(port=0, drain_delay_s=0.0, stall_timeout_s=0.6)
    async with running_router(script, settings=settings) as router:
        events = await stream(router)
        assert text_of(events) == "abcd"
        assert events[-2]["error"]["code"] == "stalled"


async def test_silence_is_waited_for_while_the_queue_holds_the_request() -> None:
    """A machine may be slow, and a place in a batch taken by others, for any time."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("a"), 0)
        await asyncio.sleep(1.0)
        worker.frame(request, byte_ids("b"), 1, finish=FinishReason.LENGTH)

    settings = RouterSettings(port=0, drain_delay_s=0.0, stall_timeout_s=0.2)
    async with running_router(script, settings=settings) as router:
        events = await stream(router)
        assert text_of(events) == "ab" and finishes(events) == [(0, "length")]


async def test_silence_of_what_the_queue_does_not_hold_is_an_error() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        worker.frame(request, byte_ids("ab"), 0)
        await worker.lose(request)
        await asyncio.sleep(100)

    settings = RouterSettings(port=0, drain_delay_s=0.0, stall_timeout_s=0.3)
    async with running_router(script, settings=settings) as router:
        events = await stream(router)
        assert events[-2]["error"]["code"] == "stalled"
        assert text_of(events) == "ab" and finishes(events) == []


async def test_logprobs_of_completions() -> None:
    async with running_router(says("añ")) as router:
        body = {"model": MODEL, "prompt": "x", "logprobs": 2}
        answer = (await router.client.post("/v1/completions", json=body)).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 1, 1]
        assert logprobs["tokens"][0] == "a" and logprobs["token_logprobs"] == [-0.5] * 3
        assert all(len(top) == 3 for top in logprobs["top_logprobs"])


async def test_undecodable_events_are_ignored() -> None:
    async def script(worker: ScriptedWorker, request: Request) -> None:
        subject = tokens_subject(request.router, request.request_id)
        worker.bus.publish(subject, b"\xc1garbage")
        worker.frame(request, byte_ids("x"), 0, choice=99)
        await says("ok")(worker, request)

    async with running_router(script) as router:
        assert text_of(await stream(router)) == "ok"
