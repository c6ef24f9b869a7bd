"""Grammars of structured output: read in one way by the router, which checks them, and the worker, which obeys them.

A grammar is text in the form of the llguidance library, which keeps an Earley parser over a lexer of derivatives and
tells at each step which tokens of the vocabulary may come next. Needs the extra `grammar`.
"""

from collections import OrderedDict
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace_shared.errors import HeadraceError
from headrace_shared.fleet_messages import ModelCard

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GRAMMAR_SYMBOLS = 20_000
MAX_LEXER_STATES = 5_000
MAX_STEP_ITEMS = 20_000
"""Of the parser, in one step: a millisecond or so."""
MAX_STEP_FUEL = 100_000
"""Of the lexer, in one step: some milliseconds."""
MAX_KNOWN = 64
MAX_KNOWN_BYTES = 512 * 1024
"""Compiled grammars that are kept: so many, of so much text. In memory one may be a hundred times as large."""
CHECKING_STACK_BYTES = 2 << 20
"""Compiling recurses with the depth of a grammar, and running out of stack ends the process. So grammars are compiled
for a first time, where that harms nobody, with much less of it than where they are used."""
USING_STACK_BYTES = 64 << 20


class GrammarError(HeadraceError):
    """The grammar is wrong or too complex. The message may quote it."""


class Grammars:
    """Of one model. Thread-safe. Compiling a grammar takes a millisecond, or much longer where it is complex; the first
    one also reads the tokenizer, which takes some hundred, if it was not prepared."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_known_bytes = 0
        self._lock = Lock()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._card.eos_token_ids

    def compile(self, grammar: str) -> LLMatcher:
        """At the beginning of the text; the caller's own. Raises GrammarError."""
        with self._lock:
            known = self._known.get(grammar)
            if known is not None:
                self._known.move_to_end(grammar)
                return known.deep_copy()
            matcher = LLMatcher(self._read_tokenizer(), grammar, log_level=0, limits=_limits())
            if matcher.is_error():
                raise GrammarError(matcher.get_error())
            self._known[grammar] = matcher
            self._num_known_bytes += len(grammar)
            while len(self._known) > MAX_KNOWN or self._num_known_bytes > MAX_KNOWN_BYTES:
                self._num_known_bytes -= len(self._known.popitem(last=False)[0])
            return matcher.deep_copy()

    def prepare(self) -> None:
        """Reads the tokenizer, while which no other thread of Python runs. Raises GrammarError."""
        with self._lock:
            self._read_tokenizer()

    def _read_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            card = self._card
            try:
                text = card.tokenizer.decode().lstrip()
                if not text.startswith("{"):  # the library would take it for the name of a file
                    raise GrammarError("this model's tokenizer is no JSON")
                self._tokenizer = LLTokenizer(text, n_vocab=card.vocab_size, eos_token=list(card.eos_token_ids))
            except ValueError as error:
                raise GrammarError(f"this model's tokenizer cannot be used with grammars: {error}") from error
        return self._tokenizer


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=MAX_STEP_ITEMS,
        step_lexer_fuel=MAX_STEP_FUEL,
        verbose_errors=False,  # they would show what a user wrote in logs
    )
