"""How large a call is, before anything of it is tokenized. Pure.

Values are not checked yet: what is out of range counts as what the check would let pass at most.
"""

from typing import Any, NamedTuple

from headrace_router.schemas import ChatBody, CompletionBody, TextPart

MAX_CHOICES = 256
"""No call that is answered with text has more sequences."""
MAX_INPUTS = 2048
"""Nor one for embeddings."""
MAX_TOKENS = 1 << 31
"""Of any answer."""


class PromptSize(NamedTuple):
    num_prompts: int
    num_chars: int
    """Of all texts."""
    num_ids: int
    """Of prompts that came as token ids."""
    num_choices: int
    """Over all prompts."""
    max_tokens: int | None
    """Of each choice, as the client wants it; None: until it ends by itself."""

    def num_tokens(self, chars_per_token: float) -> int:
        """Of all prompts, about."""
        return max(1, self.num_ids + round(self.num_chars / chars_per_token))


def size_of(body: ChatBody | CompletionBody) -> PromptSize:
    num_choices = min(MAX_CHOICES, max(1, body.n or 1))
    if isinstance(body, ChatBody):
        num_chars = sum(_num_chars(message.content) for message in body.messages)
        num_chars += sum(len(tool.model_dump_json()) for tool in body.tools or ())
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return PromptSize(1, num_chars, 0, num_choices, _at_least_one(wanted))
    given = body.prompt
    # A list of ids is one prompt. All of them are ids then: looking at each would take longer than parsing them did.
    prompts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    num_prompts = max(1, len(prompts))
    return PromptSize(
        num_prompts,
        sum(len(prompt) for prompt in prompts if isinstance(prompt, str)),
        sum(len(prompt) for prompt in prompts if isinstance(prompt, list)),
        min(max(MAX_CHOICES, min(MAX_INPUTS, num_prompts)), num_prompts * num_choices),
        _at_least_one(body.max_tokens),
    )


def _num_chars(content: str | list[TextPart] | None) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content or ())


def _at_least_one(wanted: int | None) -> int | None:
    return None if wanted is None else min(MAX_TOKENS, max(1, wanted))
