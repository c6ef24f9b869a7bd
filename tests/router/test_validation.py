"""Every bound of every parameter, and null as "not given"."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.call_limits import MAX_PROMPT_SCORES
from headrace_router.parsing import parse_body
from headrace_router.schemas import ChatBody, CompletionBody
from headrace_router.token_rules import check_some_left
from headrace_router.validation import fit
from headrace_shared.errors import InvalidRequest
from tests.byte_model import CONTEXT, END, make_card
from tests.router.valid_calls import CARD, MESSAGES, VOCAB, chat, completion


def refused(call: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(**fields)
    assert len(caught.value.message) < 500
    return caught.value


BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**70),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("presence_penalty", -2.01),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", float("-inf")),
    ("n", 0),
    ("n", 17),
    ("n", 10**400),
    ("n", -1),
    ("temperature", 10**400),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**63),
    ("max_tokens", 16.5),
    ("max_tokens", "16"),
    ("min_tokens", -1),
    ("min_tokens", CONTEXT + 1),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", "a" * 1025),
    ("stop", [1]),
    ("stop", 5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("logit_bias", {str(VOCAB): -100}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"5": 1000}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [1] * 129),
    ("stream_options", {"include_usage": True}),
    ("stream", "yes"),
    ("user", "u" * 1025),
    ("metadata", {"a": "b" * 20_000}),
    ("metadata", "text"),
    ("cache_salt", ""),
    ("cache_salt", "a/b"),
    ("cache_salt", "s" * 129),
    ("tool_choice", "required"),
    ("suffix", "x"),
    ("best_of", 3),
    ("echo", "yes"),
    ("functions", []),
    ("bad_words", [""]),
    ("bad_words", [" "]),
    ("bad_words", ["x" * 129]),
    ("bad_words", ["x"] * 129),
    ("bad_words", "x"),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1] * 16_385),
    ("logprob_token_ids", [1]),
    ("logprob_token_ids", [VOCAB]),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("return_token_ids", 1),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", CONTEXT + 1),
    ("stream_interval", 0),
    ("stream_interval", 1025),
    ("service_tier", "best"),
    ("service_tier", 5),
    ("safety_identifier", "s" * 1025),
    ("prompt_cache_key", "k" * 1025),
    ("prompt_cache_key", 5),
    ("prompt_cache_options", "long"),
    ("prompt_cache_options", {"mode": 5}),
    ("prompt_cache_retention", "r" * 1025),
    ("session_id", "s" * 1025),
    ("request_id", "r" * 1025),
    ("store", "yes"),
    ("guided_json", {}),
    ("reasoning_effort", "extreme"),
    ("chat_template", "{{ 1 }}"),
    ("use_beam_search", True),
    ("priority", 1),
    ("priority", -1),
    ("priority", "high"),
    ("continue_final_message", True),
    ("continue_final_message", "yes"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("call", [chat, completion])
def test_out_of_bounds_names_the_field(call: Any, field: str, value: Any) -> None:
    param = refused(call, **{field: value}).param
    assert param is not None and param.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function.name",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"model": None}, "model"),
    ],
)
def test_bad_chats(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize(
    "prompt", [[], [-1], [VOCAB], [[1], [VOCAB]], [1, "a"], ["a", 1], [[1], 2], {"a": 1}, 5, None, [1.5], ["a"] * 129]
)
def test_bad_prompts(prompt: Any) -> None:
    error = refused(completion, prompt=prompt)
    assert error.param is not None and error.param.startswith("prompt")


def test_the_bad_id_is_named() -> None:
    assert f"has {VOCAB}," in refused(completion, prompt=[1, VOCAB]).message
    assert "'abc'" in refused(chat, logit_bias={"abc": 1}).message


def test_too_many_sequences() -> None:
    assert refused(completion, prompt=["a"] * 100, n=3).param == "n"


def test_logprobs_of_completions() -> None:
    assert completion(logprobs=0)[1].sampling.num_logprobs == 0
    assert refused(completion, logprobs=21).param == "logprobs"
    assert refused(completion, logprobs=-1).param == "logprobs"


def test_named_tokens_need_log_probabilities() -> None:
    assert chat(logprobs=True, logprob_token_ids=[5, 5, 2])[1].sampling.logprob_token_ids == (5, 2)
    assert completion(logprobs=0, logprob_token_ids=[5])[1].sampling.logprob_token_ids == (5,)
    assert refused(chat, logprobs=True, logprob_token_ids=[VOCAB]).param == "logprob_token_ids"
    assert refused(chat, logprobs=True, logprob_token_ids=[1] * 129).param == "logprob_token_ids"


def test_rules_that_leave_no_token_are_refused() -> None:
    assert refused(chat, allowed_token_ids=[END], min_tokens=1).param == "allowed_token_ids"
    chat(allowed_token_ids=[END])
    chat(allowed_token_ids=[END, 5], min_tokens=1)
    json_object = {"response_format": {"type": "json_object"}}
    assert refused(chat, allowed_token_ids=[5], **json_object).param == "allowed_token_ids"
    assert refused(chat, bad_words=["x"], **json_object).param == "bad_words"
    tool = {"type": "function", "function": {"name": "f"}}
    assert refused(chat, bad_words=["x"], tools=[tool], tool_choice="required").param == "bad_words"


def test_bad_words_that_might_leave_no_token_are_refused() -> None:
    check_some_left([(1, 2), (3,)], (), (2, 3, 4), CARD)
    for words, never, allowed in (
        ([(1, 2), (3,)], (), (2, 3)),
        ([(1, 2), (3,)], (4,), (2, 3, 4)),
        ([(token,) for token in range(VOCAB)], (), ()),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_some_left(words, never, allowed, CARD)
        assert caught.value.param == "bad_words"


def test_log_probabilities_of_a_prompt_are_bounded_by_its_length() -> None:
    card = make_card(context=1_000_000)
    _, params = chat(prompt_logprobs=20)
    most = MAX_PROMPT_SCORES // 21
    assert fit(most, params, card, "messages").max_tokens > 0
    with pytest.raises(InvalidRequest) as caught:
        fit(most + 1, params, card, "messages")
    assert caught.value.param == "messages"


def test_null_means_not_given() -> None:
    names = [*ChatBody.model_fields, "tools", "tool_choice", "echo", "suffix", "best_of", "audio"]
    nulls = {name: None for name in names if name not in ("model", "messages")}
    assert chat(**nulls) == chat()
    names = [*CompletionBody.model_fields, "echo", "suffix", "best_of"]
    nulls = {name: None for name in names if name not in ("model", "prompt")}
    assert completion(**nulls) == completion()


def test_values_that_ask_for_nothing_are_accepted() -> None:
    neutral = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 2,
        "n": 2,
        "echo": False,
        "suffix": "",
        "priority": 0,
        "store": True,
        "something_new": {"a": 1},
    }
    chat(**neutral)
    completion(**neutral)


def test_defaults_come_from_the_card_then_from_openai() -> None:
    sampling = chat()[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.6, 0.9, 0, 5)
    sampling = chat(temperature=0, top_p=1, top_k=-1, seed=-1)[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 1.0, 0, 2**63 - 1)


@pytest.mark.parametrize(("given", "used"), [(1e-9, 0.0), (1e-4, 0.0), (1e-3, 1e-3), (2, 2.0), (0, 0.0)])
def test_tiny_temperatures_are_greedy(given: float, used: float) -> None:
    assert chat(temperature=given)[1].sampling.temperature == used


@pytest.mark.parametrize(("given", "used"), [(1e-300, 1e-6), (1e-38, 1e-6), (1e-5, 1e-5), (1.1, 1.1)])
def test_tiny_repetition_penalties_do_not_overflow(given: float, used: float) -> None:
    assert chat(repetition_penalty=given)[1].sampling.repetition_penalty == used


def test_stop_tokens() -> None:
    assert chat()[1].stop_token_ids == (END,)
    assert chat(ignore_eos=True, stop_token_ids=[7, 7])[1].stop_token_ids == (7,)
    assert chat(stop_token_ids=[7, END])[1].stop_token_ids == (END, 7)


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7)[1].max_tokens == 7


def test_parts_are_joined_in_every_role() -> None:
    parts = [{"type": "text", "text": "Answer in "}, {"type": "text", "text": "French."}]
    for role in ("system", "user", "assistant", "tool", "developer"):
        valid, _ = chat(messages=[{"role": role, "content": parts}, {"role": role, "content": []}])
        assert [message["content"] for message in valid.messages] == ["Answer in French.", ""]


def test_what_the_assistant_refused_with_is_its_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    valid, _ = chat(messages=[{"role": "assistant", "content": [part]}, *MESSAGES])
    assert valid.messages[0]["content"] == "No."
    for wrong in ({"role": "user", "content": [part]}, {"role": "assistant", "content": [{"type": "refusal"}]}):
        assert (refused(chat, messages=[wrong, *MESSAGES]).param or "").startswith("messages[0].content[0]")


def test_a_refusal_beside_the_content_is_text_too() -> None:
    for content, said in ((None, "No."), ("Well. ", "Well. No."), ([{"type": "text", "text": "Well. "}], "Well. No.")):
        message = {"role": "assistant", "content": content, "refusal": "No."}
        assert chat(messages=[message, *MESSAGES])[0].messages[0]["content"] == said
    for nothing in (None, ""):
        message = {"role": "assistant", "content": "Well.", "refusal": nothing, "function_call": None, "audio": None}
        assert chat(messages=[message, *MESSAGES])[0].messages[0]["content"] == "Well."


@pytest.mark.parametrize(
    ("field", "value"), [("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "audio_1"})]
)
def test_what_a_message_says_is_not_left_out_silently(field: str, value: Any) -> None:
    error = refused(chat, messages=[*MESSAGES, {"role": "assistant", "content": None, field: value}, *MESSAGES])
    assert (error.param, error.code) == (f"messages[{len(MESSAGES)}].{field}", "unsupported_parameter")


def test_no_alternatives_can_be_asked_for_without_log_probabilities() -> None:
    """Some clients write down every field."""
    for fields in ({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}, {"top_logprobs": 0, "logprobs": None}):
        assert chat(**fields)[1].sampling.num_logprobs is None
    assert chat(top_logprobs=0, logprobs=True)[1].sampling.num_logprobs == 0


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    card = make_card(chat_template="{{ tools }}{{ messages }}")
    valid, _ = chat(card, messages=[*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert valid.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert valid.messages[1]["content"] == ""


@pytest.mark.parametrize("arguments", ["{bad", '{"a": 1', '{"a": 1}{"b": 2}', "\ufeff{}", '{"a": ' + "9" * 5000 + "}"])
def test_a_call_whose_arguments_are_no_json_is_told_as_the_model_wrote_it(arguments: str) -> None:
    """A conversation must not end with it: clients send back what they got."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    card = make_card(chat_template="{{ tools }}{{ messages }}")
    valid, _ = chat(card, messages=[*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert valid.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    told = chat(messages=[*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}])[0].messages[1]
    assert json.dumps(arguments, ensure_ascii=False) in told["content"]


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    for arguments in ("[" * 200 + "]" * 200, "[" * 10_000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        error = refused(chat, messages=[{"role": "assistant", "tool_calls": [call]}])
        assert error.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b'{"model":"\\ud800"}',
    ],
    ids=lambda body: repr(body[:10]),
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(ChatBody, body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "best_of", "tool_choice"} - {"model"})


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5))
def test_anything_is_valid_or_refused(fields: dict[str, Any]) -> None:
    for call in (chat, completion):
        try:
            _, params = call(**fields)
        except InvalidRequest:
            continue
        assert 1 <= params.num_choices <= 16
        assert 0 <= params.sampling.temperature <= 2
        assert 0 <= params.sampling.seed < 2**63
