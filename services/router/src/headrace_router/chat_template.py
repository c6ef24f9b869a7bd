"""A model's chat template: messages to text in which control tokens cannot be forged (`templates.py` says how).

Some templates build control tokens from pieces (`'<|' + role + '|>'`). For a *dynamic* one the control tokens of the
rendered text count as well, except those that users wrote: their strings are broken by a string that is removed later.

The environment is that of transformers, so that a template means the same here and there. Templates are programs, so
this runs in a process that may be killed (`template_process.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_router.templates import PROBES, TemplateSpec
from headrace_shared.errors import InvalidRequest, ProtocolError

MAX_PROBLEM_CHARS = 1000
_SLIPS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Of a template over an unusual message, such as adding text and a list."""


class ChatTemplate:
    def __init__(self, spec: TemplateSpec) -> None:
        """Raises ProtocolError if its source is no template."""
        self._marks = spec.marks
        self._tokens = {mark: token for token, mark in self._marks.items()}
        self._break = f"\U0010fffd{spec.nonce}\U0010fffd"
        self._cut = f"\U0010fffd{spec.nonce}.cut\U0010fffd"
        self._control = _any_of(spec.controls)
        environment = _environment()
        try:
            parsed = environment.parse(spec.source)
            self._plain = environment.from_string(spec.source)
            literals = [node for node in parsed.find_all((nodes.TemplateData, nodes.Const)) if _text_of(node)]
            self._openings = _openings(spec.controls, [_text_of(node) for node in literals])
            for node in literals:
                _change_text(node, self._mark)
            self._marked = environment.from_string(parsed)
        except (jinja2.TemplateError, RecursionError, MemoryError, ValueError, ArithmeticError, SyntaxError) as error:
            raise ProtocolError(f"chat template: {str(error)[:MAX_PROBLEM_CHARS]}") from error
        self._edges = _Edges(spec.controls)
        self._bos = spec.bos_token
        self._eos = spec.eos_token

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continues: bool = False,
        is_dynamic: bool = False,
    ) -> str:
        """Text in which each control token is a mark. `continues`: it ends with the content of the last message. Raises
        InvalidRequest with the template's own words."""
        if continues:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + self._cut}]
        if is_dynamic:
            # A message's role is one of a few known words.
            messages = [
                {name: value if name == "role" else self._broken(value) for name, value in message.items()}
                for message in messages
            ]
            variables = self._broken(variables)
        bos, eos = self._mark(self._bos), self._mark(self._eos)
        text = self._run(self._marked, messages, {**variables, "bos_token": bos, "eos_token": eos})
        if continues:
            text, cut, _ = text.rpartition(self._cut)
            if not cut:
                raise InvalidRequest("The model's chat template cannot leave the last message open.")
        return self._mark(text).replace(self._break, "") if is_dynamic else text

    def render_plain(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """As transformers renders it: what `render` must agree with for harmless messages."""
        return self._run(self._plain, messages, {**variables, "bos_token": self._bos, "eos_token": self._eos})

    def probe(self) -> list[tuple[str, str] | None]:
        """Of each of PROBES, plain and with marks; None: the template refuses it, as not every one knows a system
        turn."""
        return [self._probe(messages, {"add_generation_prompt": begins}) for messages, begins in PROBES]

    def _probe(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[str, str] | None:
        try:
            return self.render_plain(messages, variables), self.render(messages, variables)
        except InvalidRequest:
            return None

    def _mark(self, text: str) -> str:
        """Control tokens in `text` become marks."""
        return self._control.sub(lambda match: self._marks[match[0]], text)

    def _broken(self, value: Any) -> Any:
        """No part of any string, however it is cut and joined, is a part of a control token."""
        if isinstance(value, str):
            before, after = self._edges.breaks(value)
            return self._break * before + self._openings.sub(self._add_break, value) + self._break * after
        if isinstance(value, Mapping):
            # Templates look names up, and ask whether it is a function; neither is what stands between a token's ends.
            return {
                self._openings.sub(self._add_break, name): item if item == "function" else self._broken(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._broken(item) for item in value]
        return value

    def _add_break(self, match: re.Match[str]) -> str:
        return match[0] + self._break

    def _run(self, template: jinja2.Template, messages: Any, variables: dict[str, Any]) -> str:
        try:
            # Clients choose names of variables: as keyword arguments they could collide with jinja's own parameters.
            return template.render({"tools": None, "documents": None, **variables, "messages": messages})
        except jinja2.TemplateError as error:
            raise InvalidRequest(self._readable(error)) from None
        except (*_SLIPS, OSError, ImportError) as error:
            # The last two: it needs of Python what can no longer be opened.
            raise InvalidRequest(
                f"The model's chat template cannot handle these messages ({type(error).__name__})."
            ) from None

    def _readable(self, error: jinja2.TemplateError) -> str:
        text = str(error.message or "The model's chat template refuses these messages.").replace(self._break, "")
        for mark, token in self._tokens.items():
            text = text.replace(mark, token)
        return text[:MAX_PROBLEM_CHARS]


class _Edges:
    """Whether a text could go on what stands before it in a control token, or be gone on with by what stands behind."""

    def __init__(self, controls: Sequence[str]) -> None:
        self._tails = tuple({token[i:] for token in controls for i in range(1, len(token))})
        self._heads = tuple({token[:i] for token in controls for i in range(1, len(token))})
        self._controls = tuple(controls)

    def breaks(self, text: str) -> tuple[bool, bool]:
        is_inner = bool(text) and any(text in token for token in self._controls)
        return is_inner or text.startswith(self._tails), is_inner or text.endswith(self._heads)


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _openings(controls: Sequence[str], literals: Sequence[str]) -> re.Pattern[str]:
    """The characters with which control tokens begin, except where a string follows that the template may look for."""
    rests: dict[str, set[str]] = {token[0]: set() for token in controls if token}
    control = _any_of(controls)
    for literal in literals:
        may_be_control = control.search(literal) or any(token.startswith(literal) for token in controls)
        if literal[:1] in rests and not may_be_control:
            rests[literal[0]].add(literal[1:])
    branches = []
    for first, following in rests.items():
        but = "|".join(map(re.escape, sorted(following)))
        branches.append(re.escape(first) + (f"(?!{but})" if but else ""))
    return re.compile("|".join(branches) or r"(?!)")


def _text_of(node: nodes.Node) -> str:
    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else ""


def _change_text(node: nodes.Node, change: Callable[[str], str]) -> None:
    if isinstance(node, nodes.TemplateData):
        node.data = change(node.data)
    elif isinstance(node, nodes.Const):
        node.value = change(node.value)


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
