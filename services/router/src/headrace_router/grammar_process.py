"""The process in which clients' schemas and grammars are compiled for a first time: one that explodes takes this
process with it, and nothing else.

    python -m headrace_router.grammar_process

A message is a `Check`, its reply a `Verdict`. The compiler is native code, and tokenizers come from workers: nothing in
here can open a file or a connection, or start a program.
"""

import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from typing import BinaryIO

import msgspec
from llguidance import LLMatcher, grammar_from
from msgspec import Struct

from headrace_router.helper_process import confine, serve, shut_in
from headrace_router.structured_output import FormKind
from headrace_shared import codec
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.grammars import CHECKING_STACK_BYTES, MAX_GRAMMAR_BYTES, GrammarError, Grammars

MAX_MEMORY_BYTES = 1 << 30
"""Of address space: for tokenizers and the grammars that are kept."""
CHECK_CPU_S = 1.0
"""Of the process' own time: a form that takes longer to compile is too complex, however busy the machine is."""
NICENESS = 10
"""What compiles for a second is seldom anybody's wish: on a machine that computes answers, too, it takes a tenth of a
core from them instead of half of one."""
MAX_MODELS = 8
MAX_ERROR_CHARS = 500
TRIAL_TOKENS = 16
TRIAL_S = 0.2
"""Of processor time. A grammar that has stood so much of a trial is not held up any longer."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the tokens of JSON: small models would not find an end to it."""


class Check(Struct, frozen=True, tag=True, kw_only=True):
    """`kind` None: only read the model's tokenizer."""

    key: str
    """Of the model."""
    card: ModelCard | None
    """None: it was sent before."""
    kind: FormKind | None
    text: str


class Verdict(Struct, frozen=True, tag=True, kw_only=True):
    grammar: str
    """Empty if there is a problem."""
    problem: str
    is_final: bool = True
    """False: another attempt may end otherwise."""


def encode_check(check: Check) -> bytes:
    """Not as other messages: tokenizers may have more bytes than any of those."""
    return msgspec.msgpack.encode(check)


_decode = msgspec.msgpack.Decoder(Check).decode


class Checker:
    def __init__(self) -> None:
        self._models: OrderedDict[str, Grammars] = OrderedDict()

    def answer(self, message: bytes) -> bytes:
        """The kernel ends the process if it takes too long."""
        request = _decode(message)
        signal.setitimer(signal.ITIMER_PROF, CHECK_CPU_S if request.kind is not None else 0)
        reply = codec.encode(self.check(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return reply

    def check(self, request: Check) -> Verdict:
        if request.card is not None:
            self._models[request.key] = Grammars(request.card)
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        grammars = self._models.get(request.key)
        if grammars is None:
            return Verdict(grammar="", problem="the model is not known", is_final=False)
        try:
            if request.kind is None:
                grammars.compile(grammar_from("choice", '["a"]'))
                return Verdict(grammar="", problem="")
            grammar = grammar_of(request.kind, request.text)
            matcher = grammars.compile(grammar)
        except (GrammarError, ValueError) as error:
            return Verdict(grammar="", problem=_first_lines(str(error)))
        # Which token may be next is known only after a look at the whole vocabulary, with limits of its own; and nested
        # repetitions grow with each token. Two ways into the grammar: along the lowest and along the highest ids.
        give_up_at = time.thread_time() + TRIAL_S
        for goes_low in (True, False):
            walk(matcher, grammars.eos_token_ids, give_up_at, goes_low=goes_low)
            if matcher.is_error():
                return Verdict(grammar="", problem=_first_lines(matcher.get_error()))
            matcher = grammars.compile(grammar)
        return Verdict(grammar=grammar, problem="")


def walk(matcher: LLMatcher, eos_token_ids: tuple[int, ...], give_up_at: float, *, goes_low: bool) -> None:
    """At most TRIAL_TOKENS tokens, each the first or the last that is allowed and does not end the text; at least the
    first is looked for. The matcher has an error then if the grammar cannot be used for so many."""
    for _ in range(TRIAL_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        for token in eos_token_ids:
            allowed &= ~(1 << token)
        if matcher.is_error() or not allowed or time.thread_time() >= give_up_at:
            return
        matcher.consume_token(((allowed & -allowed) if goes_low else allowed).bit_length() - 1)
        if matcher.is_error() or matcher.is_stopped():
            return


def grammar_of(kind: FormKind, text: str) -> str:
    """Raises ValueError."""
    if kind == "json":
        grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
    else:
        grammar = grammar_from(kind, text)
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"it becomes larger than {MAX_GRAMMAR_BYTES} bytes")
    return grammar


def _first_lines(problem: str) -> str:
    # The mark says that the library could tell more to whoever has its source.
    return problem.replace("<non-verbose/>", "").strip()[:MAX_ERROR_CHARS] or "it cannot be used"


def work(requests: BinaryIO, replies: BinaryIO) -> None:
    """In a thread that is there already: no other can be started then."""
    shut_in()
    serve(Checker().answer, requests, replies)


def main() -> None:
    confine(MAX_MEMORY_BYTES)
    os.nice(NICENESS)
    threading.stack_size(CHECKING_STACK_BYTES)
    thread = threading.Thread(target=work, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
