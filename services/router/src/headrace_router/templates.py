"""What the router and the processes that render chat templates both know. Pure, and cheap to import.

Whatever a user writes is text; control tokens come from the template alone. So the template's own literals are changed
when it is compiled: each control token in them becomes a *mark*, a string with 64 random bits in it. After rendering,
marks are control tokens and everything else is text, however the template cut, joined or trimmed the contents.
The tokenizer that reads the result (`tokenization.py`) knows the marks and not the control tokens.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now", "return_dict"}
)
"""What `chat_template_kwargs` may not set."""

MAX_MARK_CHARS = 32
"""In place of a control token."""

TEXT = b"T"
"""First byte of a reply that is what was asked for."""
PROBLEM = b"P"
"""The template refuses; its own words follow."""
UNUSABLE = b"U"
"""It is no template."""
UNKNOWN = b"?"
"""The process does not know the template, or no longer."""

PROBES: tuple[tuple[tuple[dict[str, str], ...], bool], ...] = (
    (({"role": "user", "content": "Hi."},), True),
    (({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}), True),
    (
        (
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "1 + 1?"},
        ),
        True,
    ),
    (({"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}), False),
)
"""Harmless chats, with and without the beginning of an answer: what a template does with them tells how it works."""


class TemplateSpec(NamedTuple):
    source: str
    controls: tuple[str, ...] = ()
    """The tokens that only the template may write."""
    bos_token: str = ""
    eos_token: str = ""
    nonce: str = ""
    """Names the template, and makes its marks impossible to guess."""

    @property
    def marks(self) -> dict[str, str]:
        """Control token -> what stands for it in rendered text."""
        return {token: f"\U0010fffd{self.nonce}.{i}\U0010fffd" for i, token in enumerate(self.controls)}


def new_spec(source: str, controls: Sequence[str], bos_token: str, eos_token: str) -> TemplateSpec:
    return TemplateSpec(source, tuple(controls), bos_token, eos_token, secrets.token_hex(8))
