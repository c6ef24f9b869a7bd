"""Input to items: what clients send in several forms becomes one, or names what is wrong."""

from typing import Any

import pytest

from headrace_router.parsing import parse_fields
from headrace_router.responses_api.conversation import chat_messages, num_droppable, num_excess, shortened
from headrace_router.responses_api.items import Items, items_of
from headrace_router.responses_api.schemas import ResponsesBody
from headrace_shared.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def items(given: Any, context: Items | None = None) -> Items:
    body = parse_fields(ResponsesBody, {"model": "m", "input": given})
    return items_of(body.input, "resp_1", context or [])


def shown(made: Items) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in made]


def user(text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": "user", "content": content, "status": "completed"}


def test_a_text_is_what_the_user_says() -> None:
    assert shown(items("Hi")) == [user("Hi")]


@pytest.mark.parametrize(
    "given",
    [
        {"role": "user", "content": "Hi you"},
        {"type": "message", "role": "user", "content": "Hi you"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": " you"}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi you"}], "status": "completed", "phase": None},
    ],
)
def test_messages_have_one_form(given: dict[str, Any]) -> None:
    assert shown(items([given])) == [user("Hi you")]


def test_what_the_assistant_said_comes_back_as_it_was() -> None:
    part = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    said = {"id": "msg_9", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    (item,) = items([said])
    assert item["id"] == "msg_9" and item["content"] == [{"type": "output_text", "text": "Yes.", "annotations": []}]


def test_ids_are_all_different_and_the_same_each_time() -> None:
    given = ["Hi", [{"role": "user", "content": "Hi"}, CALL, RESULT, {"type": "reasoning", "content": []}]]
    for one in given:
        ids = [item["id"] for item in items(one)]
        assert len(set(ids)) == len(ids) and ids == [item["id"] for item in items(one)]


@pytest.mark.parametrize("bad", ["", "a b", "x" * 200, "é"])
def test_ids_that_are_none_are_replaced(bad: str) -> None:
    assert items([{"id": bad, "role": "user", "content": "a"}])[0]["id"].startswith("msg_")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        ([{"role": "user"}], "input[0].content"),
        ([{"content": "a"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "a"}, {"type": "web_search_call"}], "input[1].type"),
        ([{**CALL, "name": None}], "input[0].name"),
        ([{**CALL, "call_id": ""}], "input[0].call_id"),
        ([{**CALL, "arguments": "[" * 200 + "]" * 200}], "input[0].arguments"),
        ([RESULT], "input[0].call_id"),
        ([CALL, {**RESULT, "call_id": "c2"}], "input[1].call_id"),
        ([CALL, {**RESULT, "output": None}], "input[1].output"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
    ],
)
def test_what_is_wrong_is_named(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        items(given)
    assert caught.value.param == param


def test_a_conversation_needs_no_new_input() -> None:
    assert items(None, items("Hi")) == [] and items([], items("Hi")) == []


def test_results_of_earlier_calls_and_references_to_earlier_items() -> None:
    context = items([{"role": "user", "content": "a"}, CALL])
    (result,) = items([RESULT, {"type": "item_reference", "id": context[0]["id"]}], context)
    assert result["call_id"] == "c1", "what is referred to is there already"


def test_references_make_a_conversation_no_larger() -> None:
    context = items([{"role": "user", "content": "a" * 1000}])
    assert items([{"type": "item_reference", "id": context[0]["id"]}] * 100, context) == []


def test_no_two_items_have_the_same_id() -> None:
    said = {"id": "msg_9", "role": "user", "content": "a"}
    first = items([said, said, {**CALL, "id": "msg_9"}])
    later = items([said, {**said, "id": "msg_10"}], first)
    ids = [item["id"] for item in first + later]
    assert len(set(ids)) == 5 and ids[0] == "msg_9" and ids[4] == "msg_10"


def test_a_chat_of_all_of_it() -> None:
    made = items(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Sum?"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": "Let me see."},
            CALL,
            {**CALL, "call_id": "c2"},
            RESULT,
            {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
            {"role": "assistant", "content": "Done."},
        ]
    )
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ("c1", "c2")]
    assert chat_messages("You are kind.", made) == [
        {"role": "system", "content": "You are kind."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Sum?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "assistant", "content": "Done."},
    ]


def test_a_call_that_begins_a_turn_and_a_text_behind_it() -> None:
    made = items([CALL, {"role": "assistant", "content": "and so on"}, RESULT])
    turn, result = chat_messages(None, made)
    assert turn["content"] == "and so on" and len(turn["tool_calls"]) == 1 and result["role"] == "tool"


def test_a_call_that_was_cut_off_is_left_out() -> None:
    cut = {**items([CALL])[0], "arguments": '{"a', "status": "incomplete"}
    assert chat_messages(None, [*items("Hi"), cut]) == [{"role": "user", "content": "Hi"}]


def test_a_call_whose_arguments_are_no_json_is_no_end_of_a_conversation() -> None:
    """A model wrote it, and its response was stored: the next one goes on with it."""
    made = items([{"role": "user", "content": "Hi"}, {**CALL, "arguments": "{bad"}, RESULT])
    call = chat_messages(None, made)[1]["tool_calls"][0]
    assert call["function"]["arguments"] == "{bad"


def test_the_oldest_go_first_and_instructions_and_the_last_question_stay() -> None:
    made = items(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "1"},
            CALL,
            RESULT,
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        ]
    )
    assert num_droppable(made) == 4
    kinds = [[item.get("role", item["type"]) for item in shortened(made, count)] for count in range(6)]
    assert kinds[1] == ["system", "function_call", "function_call_output", "assistant", "user"]
    assert kinds[2] == ["system", "assistant", "user"], "the result of a call that is gone goes too"
    assert kinds[4] == kinds[5] == ["system", "user"]
    assert num_droppable(shortened(made, 4)) == 0


def test_as_many_go_as_do_not_fit() -> None:
    made = items([{"role": "user", "content": "x" * 100} for _ in range(10)])
    assert [num_excess(made, fitting) for fitting in (0.99, 0.91, 0.89, 0.5, 0.0, -3.0)] == [1, 1, 2, 5, 9, 9]


def test_a_call_without_arguments_and_one_that_was_cut_off_come_back_as_they_were() -> None:
    bare = {**CALL, "arguments": ""}
    cut = {**CALL, "call_id": "c2", "arguments": '{"a', "status": "incomplete"}
    made = items([{"role": "user", "content": "Hi"}, bare, RESULT, cut])
    assert [item.get("arguments") for item in made] == [None, "", None, '{"a']
    messages = chat_messages(None, made)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert len(messages[1]["tool_calls"]) == 1, "nobody could have answered the other"
    with pytest.raises(InvalidRequest) as caught:
        items([cut, {**RESULT, "call_id": "c2"}])
    assert caught.value.param == "input[1].call_id"
