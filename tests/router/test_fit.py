"""How long an answer may get in what the prompt leaves of the model's context."""

import pytest

from headrace_router.validation import fit
from headrace_shared.errors import InvalidRequest
from tests.byte_model import CONTEXT
from tests.router.valid_calls import CARD, chat, completion


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_ok"),
    [
        (CONTEXT - 1, 1, True),
        (CONTEXT, 1, False),
        (CONTEXT + 1, 1, False),
        (CONTEXT - 10, 50, False),
        (CONTEXT, None, False),
    ],
)
def test_the_context_s_edge(num_prompt: int, max_tokens: int | None, is_ok: bool) -> None:
    _, params = chat(max_tokens=max_tokens)
    if is_ok:
        assert fit(num_prompt, params, CARD, "messages").max_tokens == max_tokens
        return
    with pytest.raises(InvalidRequest) as caught:
        fit(num_prompt, params, CARD, "messages")
    assert caught.value.code == "context_length_exceeded"
    for number in (CONTEXT, num_prompt, max_tokens or 1):
        assert f" {number} " in caught.value.message


def test_the_answer_s_length_without_a_limit() -> None:
    assert fit(56, chat()[1], CARD, "messages").max_tokens == CONTEXT - 56
    assert fit(56, completion()[1], CARD, "prompt").max_tokens == 16
    assert fit(CONTEXT - 3, completion()[1], CARD, "prompt").max_tokens == 3


def test_min_tokens_beyond_the_room_is_refused() -> None:
    _, params = chat(min_tokens=100)
    with pytest.raises(InvalidRequest) as caught:
        fit(CONTEXT - 10, params, CARD, "messages")
    assert caught.value.param == "min_tokens"
