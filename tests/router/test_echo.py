"""What an answer shows of its prompt: text, tokens, log-probabilities."""

from typing import Any

import pytest

from headrace_shared.messages import FinishReason, Request, TokenFrame
from headrace_shared.subjects import TOKENS
from tests.byte_model import CONTEXT, END, MODEL, byte_ids, byte_level_tokenizer, make_card
from tests.router.scripts import score_frames, scored
from tests.router.support import Router, ScriptedWorker, prompt_of, running_router, says, sse_events

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
WORDS = "the 🦉 says"
IDS = byte_level_tokenizer().encode(WORDS).ids
BODY = {"model": MODEL, "prompt": WORDS, "max_tokens": 20}


async def post(router: Router, path: str, **fields: Any) -> Any:
    reply = await router.client.post(path, json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def chunks(router: Router, path: str, **fields: Any) -> list[Any]:
    reply = await router.client.post(path, json={**BODY, **fields, "stream": True})
    assert reply.status_code == 200, reply.text
    return sse_events(reply.text)[:-1]


async def test_echo_puts_the_prompt_in_front_streamed_or_not() -> None:
    async with running_router(says("ab 🦉")) as router:
        answer = await post(router, TEXT, echo=True)
        assert answer["choices"][0]["text"] == WORDS + "ab 🦉"
        assert answer["usage"]["completion_tokens"] == len(byte_ids("ab 🦉")) + 1
        told = await chunks(router, TEXT, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in told) == WORDS + "ab 🦉"
        assert told[0]["choices"][0]["text"].startswith(WORDS), "with the first token, and not before"
        several = await post(router, TEXT, echo=True, prompt=[WORDS, "x"], n=2)
        assert [choice["text"] for choice in several["choices"]] == [f"{p}ab 🦉" for p in (WORDS, WORDS, "x", "x")]
        ids = await post(router, TEXT, echo=True, prompt=IDS)
        assert ids["choices"][0]["text"] == WORDS + "ab 🦉"
        assert (await post(router, TEXT))["choices"][0]["text"] == "ab 🦉"


async def test_echo_in_a_chat_repeats_what_the_answer_goes_on_with() -> None:
    async with running_router(says("dog")) as router:
        messages = [{"role": "user", "content": "A pet?"}, {"role": "assistant", "content": "My "}]
        given = {"messages": messages, "continue_final_message": True, "echo": True}
        assert (await post(router, CHAT, **given))["choices"][0]["message"]["content"] == "My dog"
        told = await chunks(router, CHAT, **given)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in told) == "My dog"
        given = {"messages": messages[:1], "echo": True}
        assert (await post(router, CHAT, **given))["choices"][0]["message"]["content"] == "dog"


async def test_stop_strings_are_not_looked_for_in_the_echo() -> None:
    async with running_router(says("ab says")) as router:
        answer = await post(router, TEXT, echo=True, stop="says")
        assert answer["choices"][0]["text"] == WORDS + "ab "


def check_scored(logprobs: Any, text: str, num_generated: int) -> None:
    num_prompt = len(IDS)
    assert logprobs["token_logprobs"][:num_prompt] == [None, *(-position / 4 for position in range(1, num_prompt))]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:num_prompt])
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == num_prompt + num_generated
    vocabulary = byte_level_tokenizer()
    for token, offset, name in zip(IDS, logprobs["text_offset"], logprobs["tokens"], strict=False):
        assert name == vocabulary.decode([token], skip_special_tokens=False)
        if "\ufffd" not in name:
            assert text[offset:].startswith(name)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_echo_with_logprobs_scores_the_prompt() -> None:
    """And the end token: evaluation tools leave out the last entry, as that of the one token they let be generated."""
    async with running_router(scored) as router:
        answer = await post(router, TEXT, echo=True, logprobs=2)
        [choice] = answer["choices"]
        check_scored(choice["logprobs"], choice["text"], 3)
        assert router.worker.requests[0].sampling.num_prompt_logprobs == 2
        told = await chunks(router, TEXT, echo=True, logprobs=2)
        joined = {
            key: [item for chunk in told for item in chunk["choices"][0]["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert joined == choice["logprobs"]
        refused = await router.client.post(TEXT, json={**BODY, "echo": True, "logprobs": 1, "n": 2, "stream": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        both = await post(router, TEXT, echo=True, logprobs=2, n=2)
        for each in both["choices"]:
            check_scored(each["logprobs"], each["text"], 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_generated_where_only_the_prompt_is_to_be_scored(stream: bool) -> None:
    async with running_router(scored) as router:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 0}
        if stream:
            told = await chunks(router, TEXT, **asked, stream_options={"include_usage": True})
            [choice], usage = told[0]["choices"], told[-1]["usage"]
        else:
            answer = await post(router, TEXT, **asked)
            [choice], usage = answer["choices"], answer["usage"]
        assert choice["text"] == WORDS and choice["finish_reason"] == "length"
        check_scored(choice["logprobs"], choice["text"], 0)
        assert usage["completion_tokens"] == 0 and usage["prompt_tokens"] == len(IDS)
        assert router.worker.requests[0].stop.max_tokens == 1, "the engine needs one to get to the end"
        for path in (TEXT, CHAT):
            refused = await router.client.post(
                path, json={**BODY, "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
            )
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_have_the_shape_of_other_servers() -> None:
    async with running_router(scored) as router:
        [choice] = (await post(router, TEXT, prompt_logprobs=1))["choices"]
        found = choice["prompt_logprobs"]
        assert found[0] is None and len(found) == len(IDS)
        for position, entries in enumerate(found[1:], 1):
            own = entries[str(IDS[position])]
            assert (own["logprob"], own["rank"]) == (-position / 4, position)
            assert isinstance(own["decoded_token"], str) and len(entries) <= 2
            if IDS[position] != 0:
                assert entries["0"]["rank"] == 1 and entries["0"]["logprob"] == -1.0
        assert choice["logprobs"] is None and choice["text"] == "ab"
        chat = await post(router, CHAT, messages=[{"role": "user", "content": "x"}], prompt_logprobs=0)
        assert chat["prompt_logprobs"][0] is None
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert all(len(entries) == 1 for entries in chat["prompt_logprobs"][1:])
        for path in (TEXT, CHAT):
            body = {**BODY, "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 1, "stream": True}
            refused = await router.client.post(path, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_of_a_new_attempt_only_what_was_not_told_counts() -> None:
    async def moved(worker: ScriptedWorker, request: Request) -> None:
        """The first worker is lost in mid-prompt; the next one begins anew, and some of the first comes late."""
        frames = list(score_frames(request))
        for frame in frames[:2]:
            worker.publish(request, frame)
        again = [TokenFrame(**{**_fields(frame), "attempt": 1}) for frame in score_frames(request, 4)]
        worker.publish(request, again[0])
        worker.publish(request, frames[2])
        for frame in again[1:]:
            worker.publish(request, frame)
        worker.frame(request, [*byte_ids("ab"), END], 0, attempt=1, finish=FinishReason.STOP)

    async with running_router(moved) as router:
        [choice] = (await post(router, TEXT, echo=True, logprobs=2))["choices"]
        check_scored(choice["logprobs"], choice["text"], 3)


def _fields(frame: TokenFrame) -> dict[str, Any]:
    return {name: getattr(frame, name) for name in frame.__struct_fields__}


async def test_lost_scores_are_found_in_the_log() -> None:
    async def lossy(worker: ScriptedWorker, request: Request) -> None:
        frames = list(score_frames(request))
        for frame in [*frames[:1], *frames[2:]]:
            worker.publish(request, frame)
        worker.publish(request, frames[1])  # out of order: a gap on arrival, whole in the log
        await says("ab")(worker, request)

    async with running_router(lossy) as router:
        [choice] = (await post(router, TEXT, echo=True, logprobs=2))["choices"]
        check_scored(choice["logprobs"], choice["text"], 3)


async def test_a_resumed_stream_does_not_echo_again() -> None:
    async with running_router(scored) as router:
        body = {**BODY, "echo": True, "logprobs": 2, "stream": True}
        reply = await router.client.post(TEXT, json=body, headers={"Headrace-Resumable": "true"})
        blocks = [block for block in reply.text.split("\n\n") if block.startswith("id:")]
        held = reply.headers["headrace-request-id"]
        for told in range(len(blocks)):
            last = blocks[told].split("\n")[0].removeprefix("id: ")
            rest = await router.client.get(f"/v1/requests/{held}", headers={"Last-Event-ID": last})
            again = [block for block in rest.text.split("\n\n") if block.startswith("id:")]
            assert again == blocks[told + 1 :]
        whole = await router.client.get(f"/v1/requests/{held}")
        assert [block for block in whole.text.split("\n\n") if block.startswith("id:")] == blocks


async def test_a_log_that_has_lost_scores_is_no_answer() -> None:
    async with running_router(scored) as router:
        body = {**BODY, "echo": True, "logprobs": 2, "stream": True}
        reply = await router.client.post(TEXT, json=body, headers={"Headrace-Resumable": "true"})
        path = f"/v1/requests/{reply.headers['headrace-request-id']}"
        assert (await router.client.get(path)).status_code == 200
        stored = router.broker.streams[TOKENS.name].stored
        for _ in range(2):  # the first frame comes twice
            stored.popitem(last=False)
        again = await router.client.get(path)
        assert (again.status_code, again.json()["error"]["code"]) == (410, "answer_expired")


async def test_token_ids_are_returned_as_they_were_drawn() -> None:
    async with running_router(says("a🦉")) as router:
        drawn = [*byte_ids("a🦉"), END]
        [choice] = (await post(router, TEXT, return_token_ids=True))["choices"]
        assert choice["token_ids"] == drawn and choice["prompt_token_ids"] == IDS
        told = await chunks(router, TEXT, return_token_ids=True)
        assert [i for chunk in told for i in chunk["choices"][0]["token_ids"]] == drawn
        assert told[0]["choices"][0]["prompt_token_ids"] == IDS
        assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in told[1:])
        chat = await post(router, CHAT, messages=[{"role": "user", "content": "x"}], return_token_ids=True)
        assert chat["choices"][0]["token_ids"] == drawn
        assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
        assert "token_ids" not in (await post(router, TEXT))["choices"][0]


async def test_a_leading_token_that_is_no_text_has_no_characters() -> None:
    card = make_card(adds_bos=True, bos_token="<|endoftext|>")
    async with running_router(scored, card=card) as router:
        [choice] = (await post(router, TEXT, echo=True, logprobs=0))["choices"]
        offsets = choice["logprobs"]["text_offset"]
        assert choice["text"] == WORDS + "ab" and offsets[:2] == [0, 0]
        assert offsets[-3:] == [len(WORDS), len(WORDS) + 1, len(WORDS) + 2]


async def test_a_prompt_is_cut_to_its_last_tokens_only_where_its_client_wants_it() -> None:
    async with running_router(scored) as router:
        long = "abcdefgh " * CONTEXT
        refused = await router.client.post(TEXT, json={**BODY, "prompt": long})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        answer = await post(router, TEXT, prompt=long, truncate_prompt_tokens=5, echo=True)
        assert prompt_of(router.worker.requests[-1]) == byte_level_tokenizer().encode(long).ids[-5:]
        assert answer["usage"]["prompt_tokens"] == 5 and answer["choices"][0]["text"] == long[-5:] + "ab"
        answer = await post(router, TEXT, prompt=long, truncate_prompt_tokens=-1)
        assert answer["usage"]["prompt_tokens"] == CONTEXT - 20
        assert (await post(router, TEXT, truncate_prompt_tokens=CONTEXT))["usage"]["prompt_tokens"] == len(IDS)
