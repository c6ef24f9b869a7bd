"""Event ids: what a client has been told, whatever the frames were."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.positions import Position, parse_position
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import RequestId

CALL = RequestId("1a2b3c4d" + "0" * 24)


def test_an_id_tells_tokens_ends_and_usage() -> None:
    position = Position(CALL, 2)
    assert position.to_id() == "1a2b3c4d.0.0"
    position.advance(0, 12, is_finished=False)
    position.advance(1, 9, is_finished=True)
    assert position.to_id() == "1a2b3c4d.12.9f"
    position.has_usage = True
    assert position.to_id() == "1a2b3c4d.12.9f.u"


@given(st.lists(st.tuples(st.integers(0, 10**9 - 1), st.booleans()), min_size=1, max_size=20), st.booleans())
def test_an_id_leads_back_to_its_position(choices: list[tuple[int, bool]], has_usage: bool) -> None:
    position = Position(CALL, len(choices))
    position.has_usage = has_usage
    for choice, (num_tokens, is_finished) in enumerate(choices):
        position.advance(choice, num_tokens, is_finished=is_finished)
    again = parse_position(position.to_id(), CALL, len(choices))
    assert again.to_id() == position.to_id()
    assert (list(again.num_tokens), again.has_usage) == ([num for num, _ in choices], has_usage)


def test_what_was_told_is_covered() -> None:
    position = parse_position("1a2b3c4d.3.5f", CALL, 2)
    assert position.covers(0, 3, is_finished=False) and not position.covers(0, 4, is_finished=False)
    assert not position.covers(0, 3, is_finished=True), "its end was not told"
    assert position.covers(1, 5, is_finished=True)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        "1a2b3c4d",
        "1a2b3c4d.",
        "1a2b3c4d.1.2",
        "ffffffff.1",
        "1a2b3c4d.-1",
        "1a2b3c4d.1.u.u",
        "1a2b3c4d.f",
        "1a2b3c4d.1234567890",
        "1a2b3c4d.١",
        "1a2b3c4d.1\n",
        "1a2b3c4d" + ".1" * 300,
    ],
)
def test_what_is_no_id_of_this_answer_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_position(wrong, CALL, 1)
    assert refused.value.param == "Last-Event-ID"
