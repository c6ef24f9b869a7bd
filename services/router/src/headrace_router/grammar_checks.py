"""Clients' schemas and grammars, checked before their requests are queued, in a process that may be killed for it."""

import asyncio
import contextlib
import hashlib
import os
import sys
from collections import OrderedDict

import structlog

from headrace_router.grammar_process import LENGTH, Check, Verdict
from headrace_router.structured_output import OutputForm
from headrace_shared import codec
from headrace_shared.errors import InvalidRequest, Overloaded, ProtocolError
from headrace_shared.messages import ModelCard

log = structlog.get_logger(__name__)

CHECK_S = 1.0
"""A form that takes longer to compile is too complex."""
START_S = 20.0
"""For the process to start and to read a tokenizer."""
MAX_WAITING = 32
MAX_KNOWN = 128
"""Verdicts that are remembered: of at most 64 KiB each."""
MAX_REPLY_BYTES = 1 << 20


_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "LC_ALL")
"""Others may hold secrets."""


class _Gone(Exception):
    """The process has ended."""


class GrammarChecks:
    """One process, started when it is first needed, and again after a form has cost it its life."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._models: set[str] = set()
        """Keys of models that the process knows."""
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, card: ModelCard, form: OutputForm) -> str:
        """The grammar for the workers. Raises InvalidRequest, or Overloaded if too many are waiting."""
        key = _key(card)
        digest = hashlib.sha256(f"{key}\0{form.kind}\0{form.text}".encode()).digest()
        verdict = self._known.get(digest)
        if verdict is None:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded("Too many schemas and grammars are waiting to be compiled.", retry_after_s=1.0)
            self._num_waiting += 1
            try:
                async with self._turn:
                    verdict = self._known.get(digest) or await self._judge(key, card, form)
            finally:
                self._num_waiting -= 1
            self._known[digest] = verdict
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        if verdict.problem:
            code = "invalid_json_schema" if form.kind == "json" else "invalid_grammar"
            raise InvalidRequest(f"'{form.param}' cannot be used: {verdict.problem}", param=form.param, code=code)
        return verdict.grammar

    async def close(self) -> None:
        await self._stop()

    async def _judge(self, key: str, card: ModelCard, form: OutputForm) -> Verdict:
        try:
            await self._introduce(key, card)
        except (TimeoutError, _Gone) as error:
            await self._stop()
            log.error("grammars cannot be checked", error=type(error).__name__)
            raise Overloaded("Schemas and grammars cannot be compiled now.", retry_after_s=5.0) from None
        request = Check(key=key, card=None, kind=form.kind, text=form.text)
        try:
            async with asyncio.timeout(CHECK_S):
                return await self._ask(request)
        except (TimeoutError, _Gone):
            log.info("a grammar was too complex", kind=form.kind, num_bytes=len(form.text))
            await self._stop()
            return Verdict(grammar="", problem=f"it takes more than {CHECK_S:.0f} s, or too much memory, to compile.")
        except asyncio.CancelledError:
            await self._stop()  # its reply would be taken for the next one's
            raise

    async def _introduce(self, key: str, card: ModelCard) -> None:
        """Starts the process if there is none, and tells it of the model."""
        if self._process is None or self._process.returncode is not None:
            self._models.clear()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace_router.grammar_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_REPLY_BYTES,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        if key not in self._models:
            try:
                async with asyncio.timeout(START_S):
                    verdict = await self._ask(Check(key=key, card=card, kind=None, text=""))
            except asyncio.CancelledError:
                await self._stop()
                raise
            if verdict.problem:
                raise InvalidRequest(f"Structured output is not possible with this model: {verdict.problem}")
            self._models.add(key)

    async def _ask(self, request: Check) -> Verdict:
        """Raises _Gone."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        data = codec.encode(request)
        try:
            process.stdin.write(LENGTH.pack(len(data)) + data)
            await process.stdin.drain()
            length = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
            return codec.decode(await process.stdout.readexactly(length), Verdict)
        except (OSError, asyncio.IncompleteReadError, ProtocolError) as error:
            raise _Gone from error

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _key(card: ModelCard) -> str:
    facts = f"{card.model}\0{card.vocab_size}\0{card.eos_token_ids}\0{card.created}"
    return hashlib.sha256(facts.encode() + card.tokenizer).hexdigest()
