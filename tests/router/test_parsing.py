"""What is said of a body that is not right."""

import json
from typing import Any

import pytest

from headrace_router.parsing import parse_body
from headrace_router.schemas import CompletionBody
from headrace_shared.errors import InvalidRequest


def refused(body: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionBody, body.encode())
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "param", "said"),
    [
        ([1, 2, "a"], "prompt[2]", "integer"),
        (["a", "b", 1], "prompt[2]", "string"),
        ([[1], [2], "a"], "prompt[2]", "array"),
        ([[1], [2, 3, None]], "prompt[1][2]", "integer"),
        ({"a": 1}, "prompt", "string"),
    ],
)
def test_the_element_that_is_wrong_is_named(prompt: Any, param: str, said: str) -> None:
    """Not the first one, which is right in another form of the field."""
    error = refused(json.dumps({"model": "m", "prompt": prompt}))
    assert (error.param, error.code) == (param, "invalid_type")
    assert said in error.message


@pytest.mark.parametrize("half", ["\ud83d", "\ud83d!", "\ude00", "\ud83d\ud83d"])
def test_half_a_character_is_called_that(half: str) -> None:
    """Clients cut texts in the middle of one, and escape what is left of it."""
    error = refused(json.dumps({"model": "m", "prompt": half}))
    assert error.code == "invalid_json"
    assert "half of a surrogate pair stands alone at line 1" in error.message
