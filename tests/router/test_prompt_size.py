"""How large a call is, before it is tokenized or even checked."""

from typing import Any

import pytest

from headrace_router.prompt_size import MAX_CHOICES, MAX_TOKENS, PromptSize, size_of
from headrace_router.schemas import ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"prompt": "hello"}, PromptSize(1, 5, 0, 1, None)),
        ({"prompt": ["hello", "you"], "n": 2, "max_tokens": 7}, PromptSize(2, 8, 0, 4, 7)),
        ({"prompt": [1, 2, 3]}, PromptSize(1, 0, 3, 1, None)),
        ({"prompt": [[1, 2], [3]]}, PromptSize(2, 0, 3, 2, None)),
        ({"prompt": "", "n": -3, "max_tokens": -1}, PromptSize(1, 0, 0, 1, 1)),
        ({"prompt": "a", "n": 10**30}, PromptSize(1, 1, 0, MAX_CHOICES, None)),
        ({"prompt": "a", "max_tokens": 10**400}, PromptSize(1, 1, 0, 1, MAX_TOKENS)),
    ],
)
def test_of_completions(fields: dict[str, Any], size: PromptSize) -> None:
    assert size_of(CompletionBody.model_validate({"model": "m", **fields})) == size


def test_of_chats() -> None:
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "de"}, {"type": "text"}]},
        {"role": "assistant", "content": None},
    ]
    body = {"model": "m", "messages": messages, "max_tokens": 9, "max_completion_tokens": 4}
    assert size_of(ChatBody.model_validate(body)) == PromptSize(1, 5, 0, 1, 4)


def test_tokens_are_guessed_from_characters() -> None:
    assert PromptSize(1, 400, 10, 1, None).num_tokens(4.0) == 110
    assert PromptSize(1, 0, 0, 1, None).num_tokens(4.0) == 1
