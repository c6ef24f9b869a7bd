"""How large a call is, before anything of it is tokenized. Pure.

Values are not checked yet: what is out of range counts as what the check would let pass at most.
"""

from typing import NamedTuple

from headrace_router.schemas import ChatBody, CompletionBody, TextPart

MAX_CHOICES = 256
"""No call that is answered with text has more sequences."""
MAX_INPUTS = 2048
"""Nor one for embeddings."""


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
    prompts = body.prompt
    texts: list[str] = [prompts] if isinstance(prompts, str) else [text for text in prompts if isinstance(text, str)]
    rows: list[list[int]] = [row for row in prompts if isinstance(row, list)] if not isinstance(prompts, str) else []
    num_single = sum(isinstance(item, int) for item in prompts) if not isinstance(prompts, str) else 0
    num_prompts = max(1, len(texts) + len(rows))
    return PromptSize(
        num_prompts,
        sum(map(len, texts)),
        sum(map(len, rows)) + num_single,
        min(max(MAX_CHOICES, min(MAX_INPUTS, num_prompts)), num_prompts * num_choices),
        _at_least_one(body.max_tokens),
    )


def _num_chars(content: str | list[TextPart] | None) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content or ())


def _at_least_one(wanted: int | None) -> int | None:
    return None if wanted is None else max(1, wanted)
