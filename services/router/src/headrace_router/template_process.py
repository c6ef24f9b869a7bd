"""The process in which models' chat templates are compiled and rendered: programs that came with a model.

    python -m headrace_router.template_process

A message is JSON: ["learn", TemplateSpec] or ["render", nonce, messages, variables, continues, is_dynamic, max_chars].
What takes too much of the processor's time is ended by the kernel, what takes too much memory is refused; nothing in
here can open a file or a connection, or start a program.
"""

import json
import signal
import sys
from collections import OrderedDict
from typing import Any

from headrace_router.chat_template import ChatTemplate
from headrace_router.helper_process import confine, serve, shut_in
from headrace_router.templates import PROBLEM, TEXT, UNKNOWN, UNUSABLE, TemplateSpec, new_spec
from headrace_shared.errors import InvalidRequest, ProtocolError

LEARN_CPU_S = 1.0
RENDER_CPU_S = 0.5
MAX_MEMORY_BYTES = 512 << 20
"""Of address space."""
MAX_TEMPLATES = 64
_WARMING = (
    "{{ messages | tojson(indent=1) }}{{ strftime_now('%c %Z') }}{{ 'a b' | wordwrap(1) }}{{ lipsum(1) }}"
    "{{ '%s' | format(1) }}{{ '{}'.format(1) }}{{ [1] | random }}"
    "{{ 1 | pprint }}{{ '&lt;' | striptags | urlize }}{{ raise_exception('warm') }}"
)
"""Uses what jinja and Python import only when it is used."""


class Renderer:
    def __init__(self) -> None:
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()

    def answer(self, kind: str, *arguments: Any) -> bytes:
        try:
            if kind == "learn":
                return TEXT + json.dumps(self._learn(TemplateSpec(*arguments))).encode()
            return self._render(*arguments)
        except ProtocolError as error:
            return UNUSABLE + _utf8(str(error))
        except InvalidRequest as error:
            return PROBLEM + _utf8(error.message)
        except RecursionError:
            return PROBLEM + b"These messages are nested too deeply."
        except MemoryError:
            return PROBLEM + b"The model's chat template takes too much memory with these messages."

    def _learn(self, spec: TemplateSpec) -> list[tuple[str, str] | None]:
        template = ChatTemplate(spec._replace(controls=tuple(spec.controls)))
        self._templates[spec.nonce] = template
        if len(self._templates) > MAX_TEMPLATES:
            self._templates.popitem(last=False)
        return template.probe()

    def _render(
        self, nonce: str, messages: Any, variables: Any, continues: bool, is_dynamic: bool, max_chars: int
    ) -> bytes:
        template = self._templates.get(nonce)
        if template is None:
            return UNKNOWN
        self._templates.move_to_end(nonce)
        text = template.render(messages, variables, continues=continues, is_dynamic=is_dynamic)
        if len(text) > max_chars:
            return PROBLEM + b"The model's chat template makes a prompt of these messages that exceeds the context."
        return TEXT + _utf8(text)


def _utf8(text: str) -> bytes:
    """Half a surrogate pair, which JSON can hold, has no UTF-8."""
    return text.encode(errors="replace")


def answer_in_time(renderer: Renderer, data: bytes) -> bytes:
    message = json.loads(data)
    # The timer counts this process's own time, so that a busy machine makes nobody's template too slow.
    signal.setitimer(signal.ITIMER_PROF, LEARN_CPU_S if message[0] == "learn" else RENDER_CPU_S)
    reply = renderer.answer(*message)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return reply


def warm_up() -> None:
    """Brings in what Python opens only when it is first needed: later it could not."""
    ChatTemplate(new_spec(_WARMING, ("<|warm|>",), "", "")).probe()


def prepare() -> None:
    """Nothing that a template could reach, were it to get out of its sandbox, is left open."""
    confine(MAX_MEMORY_BYTES)
    warm_up()
    shut_in()


def main() -> None:
    prepare()
    renderer = Renderer()
    serve(lambda data: answer_in_time(renderer, data), sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
