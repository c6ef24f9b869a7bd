"""What a call says and hears, for traces, where the operator has asked for it. In the conventions' own form:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import json
from collections.abc import Sequence

from headrace_router.schemas import ChatBody, CompletionBody
from headrace_shared.messages import FinishReason

MAX_CHARS = 64 * 1024
"""Of a prompt, and of an answer; what is longer is cut."""


class CallContent:
    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        """By choice."""
        self._num_chars = 0

    def heard(self, choice: int, text: str) -> None:
        if text and self._num_chars < MAX_CHARS:
            self._texts.setdefault(choice, []).append(text[: MAX_CHARS - self._num_chars])
            self._num_chars += len(text)

    def answers(self, finishes: Sequence[FinishReason | None]) -> str:
        """As JSON; `finishes` of all choices, None for one that did not come to its end."""
        return json.dumps(
            [
                {
                    "role": "assistant",
                    "parts": [{"type": "text", "content": "".join(self._texts.get(choice, ()))}],
                    "finish_reason": finish.value if finish is not None else "error",
                }
                for choice, finish in enumerate(finishes)
            ],
            ensure_ascii=False,
        )


def prompt_of(body: ChatBody | CompletionBody) -> str:
    """The messages of a valid body, as JSON. Prompts that came as token ids are left out."""
    if isinstance(body, CompletionBody):
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = [("user", prompt) for prompt in prompts if isinstance(prompt, str)]
    else:
        texts = [(message.role, _text(message.content)) for message in body.messages]
    left = MAX_CHARS
    messages = []
    for role, text in texts:
        messages.append({"role": role, "parts": [{"type": "text", "content": text[:left]}]})
        left = max(0, left - len(text))
    return json.dumps(messages, ensure_ascii=False)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(getattr(part, "text", None) or "" for part in parts)
