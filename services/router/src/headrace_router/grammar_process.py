"""The process in which clients' schemas and grammars are compiled for a first time: one that explodes takes this
process with it, and nothing else.

    python -m headrace_router.grammar_process

Reads requests from standard input and writes replies to standard output, in turn, each behind its length.
"""

import resource
import signal
import struct
import sys
import threading
import time
from collections import OrderedDict
from typing import BinaryIO

from llguidance import LLMatcher, grammar_from
from msgspec import Struct

from headrace_router.structured_output import FormKind
from headrace_shared import codec
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.grammars import CHECKING_STACK_BYTES, MAX_GRAMMAR_BYTES, GrammarError, Grammars
from headrace_shared.tether import end_with_parent

MAX_MEMORY_BYTES = 1 << 30
"""Of address space: for tokenizers and the grammars that are kept."""
MAX_GROWTH_BYTES = 256 << 20
"""For compiling one grammar."""
MAX_MODELS = 8
MAX_ERROR_CHARS = 500
TRIAL_TOKENS = 16
TRIAL_S = 0.2
"""A grammar that has stood so much of a trial is not held up any longer."""
LENGTH = struct.Struct("<I")
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


class Checker:
    def __init__(self) -> None:
        self._models: OrderedDict[str, Grammars] = OrderedDict()

    def check(self, request: Check) -> Verdict:
        if request.card is not None:
            self._models[request.key] = Grammars(request.card)
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        grammars = self._models.get(request.key)
        if grammars is None:
            return Verdict(grammar="", problem="the model is not known", is_final=False)
        if request.kind is not None:
            limit_memory(min(_address_space_bytes() + MAX_GROWTH_BYTES, MAX_MEMORY_BYTES))
        try:
            return self._compile(request, grammars)
        finally:
            limit_memory(MAX_MEMORY_BYTES)

    def _compile(self, request: Check, grammars: Grammars) -> Verdict:
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
        give_up_at = time.monotonic() + TRIAL_S
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
        if matcher.is_error() or not allowed or time.monotonic() >= give_up_at:
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
    return problem.strip()[:MAX_ERROR_CHARS] or "it cannot be used"


def limit_memory(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, MAX_MEMORY_BYTES))


def _address_space_bytes() -> int:
    """That this process has; the most it may have where nobody tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return MAX_MEMORY_BYTES


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Until the requests end."""
    checker = Checker()
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        data = requests.read(LENGTH.unpack(head)[0])
        try:
            verdict = checker.check(codec.decode(data, Check))
        except ProtocolError:
            return  # cut off in the middle
        reply = codec.encode(verdict)
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


def main() -> None:
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router, which ends this one
    limit_memory(MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(CHECKING_STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
