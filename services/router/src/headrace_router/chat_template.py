"""A model's chat template: messages to text in which control tokens cannot be forged.

Whatever a user writes is text; control tokens come from the template alone. So the template's own literals are changed
when it is compiled: each special token in them becomes a *mark*, a string with 64 random bits in it. After rendering,
marks are control tokens and everything else is text, however the template cut, joined or trimmed the contents.
The tokenizer that reads the result (`tokenization.py`) knows the marks and not the special tokens.

Some templates build special tokens from pieces (`'<|' + role + '|>'`). `is_dynamic` then makes the special tokens of
the rendered text count as well, except those that were in a message: they are broken by a string that is removed later.

The environment is that of transformers, so that a template means the same here and there.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_shared.errors import InvalidRequest, ProtocolError

RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now", "return_dict"}
)
"""What `chat_template_kwargs` may not set."""


class ChatTemplate:
    """Compiled; may be used by several threads."""

    def __init__(self, source: str, special_tokens: Sequence[str], bos_token: str = "", eos_token: str = "") -> None:
        """Raises ProtocolError if `source` is no template."""
        nonce = secrets.token_hex(8)
        self.marks = {token: f"\U0010fffd{nonce}.{i}\U0010fffd" for i, token in enumerate(special_tokens)}
        """Special token -> what stands for it in rendered text."""
        self._tokens = {mark: token for token, mark in self.marks.items()}
        self._break = f"\U0010fffd{nonce}\U0010fffd"
        self._cut = f"\U0010fffd{nonce}.cut\U0010fffd"
        longest_first = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.is_dynamic = False
        self.mentions_developer = "developer" in source
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._plain = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ProtocolError(f"chat template: {error}") from error
        for node in parsed.find_all((nodes.TemplateData, nodes.Const)):
            _mark_literal(node, self.mark)
        self._marked = environment.from_string(parsed)
        self._bos = bos_token
        self._eos = eos_token

    def mark(self, text: str) -> str:
        """Special tokens in `text` become marks."""
        return self._special.sub(lambda match: self.marks[match[0]], text)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continues: bool = False
    ) -> str:
        """Text in which each control token is a mark. `continues`: it ends with the content of the last message. Raises
        InvalidRequest with the template's own words."""
        if continues:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + self._cut}]
        contents: Sequence[Mapping[str, Any]] = messages
        if self.is_dynamic:
            # A role is one of a few known words.
            contents = [_break_strings(message, self._broken, but="role") for message in messages]
            variables = _break_strings(variables, self._broken)
        bos, eos = self.mark(self._bos), self.mark(self._eos)
        text = self._run(self._marked, contents, {**variables, "bos_token": bos, "eos_token": eos})
        if continues:
            text, cut, _ = text.rpartition(self._cut)
            if not cut:
                raise InvalidRequest(
                    "The model's chat template cannot leave the last message open.",
                    param="continue_final_message",
                    code="template_error",
                )
        return self.mark(text).replace(self._break, "") if self.is_dynamic else text

    def render_plain(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """As transformers renders it: what `render` must agree with for harmless messages."""
        return self._run(self._plain, messages, {**variables, "bos_token": self._bos, "eos_token": self._eos})

    def _broken(self, text: str) -> str:
        return self._special.sub(lambda match: match[0][:1] + self._break + match[0][1:], text)

    def _run(self, template: jinja2.Template, messages: Any, variables: dict[str, Any]) -> str:
        try:
            # Clients choose names of variables: as keyword arguments they could collide with jinja's own parameters.
            return template.render({"tools": None, "documents": None, **variables, "messages": messages})
        except jinja2.TemplateError as error:
            raise InvalidRequest(self._readable(error), param="messages", code="template_error") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            # A template's slip over an unusual message, such as adding text and a list.
            raise InvalidRequest(
                f"The model's chat template cannot handle these messages ({type(error).__name__}).",
                param="messages",
                code="template_error",
            ) from None

    def _readable(self, error: jinja2.TemplateError) -> str:
        text = str(error.message or "The model's chat template refuses these messages.").replace(self._break, "")
        for mark, token in self._tokens.items():
            text = text.replace(mark, token)
        return text[:1000]


def _mark_literal(node: nodes.Node, mark: Callable[[str], str]) -> None:
    if isinstance(node, nodes.TemplateData):
        node.data = mark(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = mark(node.value)


def _break_strings(value: Any, broken: Callable[[str], str], *, but: str | None = None) -> Any:
    """Special tokens in all strings, except under the key `but`."""
    if isinstance(value, str):
        return broken(value)
    if isinstance(value, Mapping):
        return {
            broken(name): item if name == but and isinstance(item, str) else _break_strings(item, broken, but=but)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_break_strings(item, broken, but=but) for item in value]
    return value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
