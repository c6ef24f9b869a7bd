"""The process in which models' chat templates are compiled and rendered: programs that came with a model.

    python -m headrace_router.template_process

Reads messages from standard input and writes replies to standard output, in turn, each behind its length. A message is
JSON: ["learn", TemplateSpec] or ["render", nonce, messages, variables, continues, is_dynamic, max_chars]. What takes
too much of the processor's time is ended by the kernel, what takes too much memory is refused; nothing in here can
write a file or start a program.
"""

import contextlib
import json
import resource
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

from headrace_router.chat_template import ChatTemplate
from headrace_router.templates import LENGTH, PROBLEM, TEXT, UNKNOWN, UNUSABLE, TemplateSpec
from headrace_shared.errors import InvalidRequest, ProtocolError
from headrace_shared.tether import end_with_parent

LEARN_CPU_S = 1.0
RENDER_CPU_S = 0.5
MAX_MEMORY_BYTES = 512 << 20
"""Of address space."""
MAX_TEMPLATES = 64
NUM_FILES = 8
"""Descriptors: standard ones and a few of Python's own."""


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


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Until the requests end."""
    renderer = Renderer()
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        message = json.loads(requests.read(LENGTH.unpack(head)[0]))
        # The timer counts this process's own time, so that a busy machine makes nobody's template too slow.
        signal.setitimer(signal.ITIMER_PROF, LEARN_CPU_S if message[0] == "learn" else RENDER_CPU_S)
        reply = renderer.answer(*message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


def confine() -> None:
    """Nothing that a template could reach, were it to get out of its sandbox, is left open."""
    # Where memory gets short, this process goes first, and not the router.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for kind, most in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, NUM_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def main() -> None:
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this one
    confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
