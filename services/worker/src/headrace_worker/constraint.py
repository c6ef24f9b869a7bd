"""Which tokens a sequence with a grammar, or with tokens that its client allows or forbids, may get next."""

import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from headrace_shared.codec import unpack_ids
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.grammars import USING_STACK_BYTES, GrammarError, Grammars
from headrace_shared.messages import GRAMMAR_FAILED, Admission
from headrace_worker.restriction import Restriction, restriction_of

WAIT_S = 0.02
"""An engine that has nothing but a grammar to wait for looks so often whether there is something else to do."""


class Constraint:
    """Where one sequence stands in its grammar. `record` every token drawn for it. All but `is_ready` wait until the
    grammar is compiled."""

    def __init__(self, compiling: Future[LLMatcher]) -> None:
        self._compiling = compiling
        self._matcher: LLMatcher | None = None
        self._problem: str | None = None

    @property
    def is_ready(self) -> bool:
        return self._compiling.done()

    def wait(self) -> bool:
        """Whether it is ready, perhaps after `WAIT_S`."""
        futures.wait([self._compiling], timeout=WAIT_S)
        return self._compiling.done()

    def abandon(self) -> None:
        """Nobody wants it any more: others' grammars need not wait for it."""
        self._compiling.cancel()

    @property
    def matcher(self) -> LLMatcher | None:
        """None: there is a problem."""
        if self._matcher is None and self._problem is None:
            try:
                self._matcher = self._compiling.result()
            except GrammarError as error:
                self._problem = GRAMMAR_FAILED + str(error)
        if self._matcher is not None and self._matcher.is_error():
            self._problem = GRAMMAR_FAILED + self._matcher.get_error()
            self._matcher = None
        return self._matcher

    @property
    def problem(self) -> str | None:
        """Why there is no next token; None if there is one."""
        return None if self.matcher is not None else self._problem

    def record(self, token: int) -> None:
        if (matcher := self.matcher) is not None:
            matcher.consume_token(token)

    def copy(self) -> "Constraint":
        copied = copy(self)
        copied._matcher = None if (matcher := self.matcher) is None else matcher.deep_copy()
        return copied


Limit = Constraint | Restriction


class Constraints:
    """Compiles grammars in a thread of its own, so that a complex one holds up nobody else's tokens."""

    def __init__(self, card: ModelCard, num_threads: int) -> None:
        """`num_threads` compute masks; one: the caller's own, which costs no change of threads."""
        self._grammars = Grammars(card)
        self._vocab_size = card.vocab_size
        self._compiler = _thread_with_stack(USING_STACK_BYTES)
        # While the model is loaded: with the first grammar it would stop everybody's tokens for tenths of a second.
        self._compiler.submit(self._prepare)
        self._executor: LLExecutor | None = None
        self._num_threads = num_threads

    def of(self, admission: Admission) -> Limit | None:
        """Of a sequence that is admitted, behind the output that it has; None: it may get any token."""
        grammar = admission.request.sampling.grammar
        if not grammar:
            return restriction_of(admission, self._vocab_size)
        return Constraint(self._compiler.submit(self._compile, grammar, unpack_ids(admission.output)))

    def masks(self, constraints: Sequence[Limit]) -> NDArray[np.int32]:
        """int32 [constraints, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come next.
        A row of a constraint that has a problem, or gets one by this, means nothing."""
        bits: NDArray[np.int32] = allocate_token_bitmask(len(constraints), self._vocab_size)
        able = []
        for row, each in enumerate(constraints):
            if isinstance(each, Restriction):
                bits[row] = each.words
            elif (matcher := each.matcher) is not None:
                able.append((matcher, row))
        if self._num_threads == 1:
            for matcher, row in able:
                fill_next_token_bitmask(matcher, bits, row)
        elif able:
            if self._executor is None:
                self._executor = LLExecutor(self._num_threads)
            fill_next_token_bitmask_par(self._executor, able, bits)
        return bits

    def _prepare(self) -> None:
        with suppress(GrammarError):  # told to whoever comes with a grammar
            self._grammars.prepare()

    def _compile(self, grammar: str, output: Sequence[int]) -> LLMatcher:
        matcher = self._grammars.compile(grammar)
        if output:
            matcher.consume_tokens(list(output))
        return matcher


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """Of address space; memory is taken as it is used."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
    before = threading.stack_size(num_bytes)
    try:
        executor.submit(int).result()  # starts the thread, which is then kept
    finally:
        threading.stack_size(before)
    return executor
