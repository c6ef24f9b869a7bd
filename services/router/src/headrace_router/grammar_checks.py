"""Clients' schemas and grammars, checked before their requests are queued, in a process that may be killed for it."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from functools import lru_cache

import structlog

from headrace_router.grammar_process import CHECK_CPU_S, MAX_MEMORY_BYTES, MAX_MODELS, Check, Verdict, encode_check
from headrace_router.helper import Helper, HelperGone, NoHelper
from headrace_router.structured_output import OutputForm
from headrace_shared import codec
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError
from headrace_shared.fleet_messages import ModelCard

log = structlog.get_logger(__name__)

PATIENCE_S = 20.0
"""By the clock, for a machine that is busy with what goes before it; the process itself ends after much less of the
processor's time."""
START_S = 60.0
"""By the clock, for the process to start and to read a tokenizer, which takes some seconds at most."""
MAX_GROWTH_BYTES = 256 << 20
"""Of the process' address space, for compiling one form."""
MAX_WAITING = 32
MAX_WAITING_OF_ONE = 8
"""Of one caller, so that whoever sends what takes long leaves room for others."""
DOUBT_S = 60.0
"""A form that was too complex is not tried again for so long."""
MAX_KNOWN = 128
"""Verdicts that are remembered: of at most 64 KiB each."""
MAX_UNUSABLE = 64
MAX_REPLY_BYTES = 1 << 20


class GrammarChecks:
    """One process, started when it is first needed, and again after a form has cost it its life."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._helper: Helper | None = None
        self._models: set[str] = set()
        """Keys of models that the process knows."""
        self._unusable: OrderedDict[str, str] = OrderedDict()
        """Keys of models whose tokenizers cannot be used, with the reason. To find out takes everybody's time."""
        self._turn = asyncio.Lock()
        self._known: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        """With the time when it was found."""
        self._tasks: dict[asyncio.Task[Verdict], str] = {}
        """With who asked first."""

    async def check(self, card: ModelCard, form: OutputForm, owner: str = "") -> str:
        """The grammar for the workers. `owner`: whoever asks. Raises InvalidRequest, or Overloaded if too many are
        waiting."""
        key = _key(card)
        digest = hashlib.sha256(f"{key}\0{form.kind}\0{form.text}".encode()).digest()
        verdict = self._recall(digest)
        if verdict is None:
            if len(self._tasks) >= MAX_WAITING or list(self._tasks.values()).count(owner) >= MAX_WAITING_OF_ONE:
                raise Overloaded("Too many schemas and grammars are waiting to be compiled.", retry_after_s=1.0)
            # Not cut off with its client: the process would have to be killed, which costs everybody else a new one.
            task = asyncio.create_task(self._find(digest, key, card, form), name="grammar-check")
            self._tasks[task] = owner
            task.add_done_callback(self._on_done)
            verdict = await asyncio.shield(task)
        if verdict.problem:
            code = "invalid_json_schema" if form.kind == "json" else "invalid_grammar"
            raise InvalidRequest(f"'{form.param}' cannot be used: {verdict.problem}", param=form.param, code=code)
        return verdict.grammar

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop()

    async def _find(self, digest: bytes, key: str, card: ModelCard, form: OutputForm) -> Verdict:
        async with self._turn:
            verdict = self._recall(digest)
            if verdict is None:
                verdict = await self._judge(key, card, form)
                self._known[digest] = verdict, time.monotonic()
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        return verdict

    def _recall(self, digest: bytes) -> Verdict | None:
        verdict, found_at = self._known.get(digest, (None, 0.0))
        if verdict is None or (not verdict.is_final and time.monotonic() - found_at > DOUBT_S):
            return None
        self._known.move_to_end(digest)
        return verdict

    def _on_done(self, task: "asyncio.Task[Verdict]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _judge(self, key: str, card: ModelCard, form: OutputForm) -> Verdict:
        try:
            await self._introduce(key, card)
        except (TimeoutError, HelperGone) as error:
            await self._stop()
            log.error("grammars cannot be checked", error=type(error).__name__)
            raise Overloaded("Schemas and grammars cannot be compiled now.", retry_after_s=5.0) from None
        request = Check(key=key, card=None, kind=form.kind, text=form.text)
        assert self._helper is not None
        self._helper.limit_growth(MAX_GROWTH_BYTES)
        try:
            verdict = await self._ask(request, self._patience_s)
            if not verdict.is_final:
                self._models.discard(key)  # the process has room for a few models only, and had to forget this one
                raise Overloaded("Schemas and grammars of many models are in use.", retry_after_s=1.0)
            return verdict
        except (TimeoutError, NoHelper):
            await self._stop()
            raise Overloaded("Schemas and grammars cannot be compiled now.", retry_after_s=5.0) from None
        except HelperGone:
            log.info("a grammar was too complex", kind=form.kind, num_bytes=len(form.text))
            await self._stop()
            # What the process had kept of others' counts, too: whoever asks later may be luckier.
            problem = f"it takes more than {CHECK_CPU_S:.0f} s, or too much memory, to compile."
            return Verdict(grammar="", problem=problem, is_final=False)

    async def _introduce(self, key: str, card: ModelCard) -> None:
        """Starts the process if there is none, and tells it of the model. Raises InvalidRequest, HelperGone or
        TimeoutError."""
        if key in self._unusable:
            raise _unusable(self._unusable[key])
        if self._helper is None or not self._helper.is_alive:
            self._models.clear()
            self._helper = await Helper.start("headrace_router.grammar_process", max_reply_bytes=MAX_REPLY_BYTES)
        elif key not in self._models:
            self._helper.limit_growth(MAX_MEMORY_BYTES)
        if key not in self._models:
            verdict = await self._ask(Check(key=key, card=card, kind=None, text=""), START_S)
            if verdict.problem:
                self._unusable[key] = verdict.problem
                if len(self._unusable) > MAX_UNUSABLE:
                    self._unusable.popitem(last=False)
                raise _unusable(verdict.problem)
            self._models.add(key)

    async def _ask(self, request: Check, timeout_s: float) -> Verdict:
        """Raises HelperGone or TimeoutError."""
        assert self._helper is not None
        try:
            return codec.decode(await self._helper.ask(encode_check(request), timeout_s), Verdict)
        except ProtocolError as error:
            raise HelperGone from error

    async def _stop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            await helper.kill()


def _unusable(problem: str) -> InvalidRequest:
    return InvalidRequest(f"Structured output is not possible with this model: {problem}")


@lru_cache(MAX_MODELS)  # tokenizers have ten megabytes, and each call with a form asks
def _key(card: ModelCard) -> str:
    facts = f"{card.model}\0{card.vocab_size}\0{card.eos_token_ids}\0{card.created}"
    return hashlib.sha256(facts.encode() + card.tokenizer).hexdigest()
