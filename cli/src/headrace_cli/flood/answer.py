"""Reads a streamed answer in OpenAI's form, and tells a meter of it."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from headrace_cli.flood.meter import Exchange, Meter

MAX_LINE = 1 << 20
MAX_ERROR_BODY = 1 << 16


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Problem(Struct):
    message: str | None = None
    code: str | int | None = None
    type: str | None = None


class _Event(Struct):
    """Of a chunk only what is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Problem | None = None


class _Refusal(Struct):
    error: _Problem | str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class StreamedAnswer:
    """The listener of one request. `now` is the flood's clock."""

    def __init__(self, exchange: Exchange, meter: Meter, now: Callable[[], float], *, keeps_text: bool) -> None:
        self._exchange = exchange
        self._meter = meter
        self._now = now
        self._keeps_text = keeps_text
        self._status = 0
        self._is_stream = False
        self._rest = b""
        self._is_done = False
        self._error = ""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def error(self) -> str:
        """What was wrong with the answer, once it has ended. Short, and of few kinds."""
        if self._status != 200:
            return f"http {self._status}{_code_of(self._rest)}"
        if not self._is_stream:
            return "no event stream"
        return self._error or ("" if self._is_done else "broke off")

    def on_status(self, status: int, content_type: str) -> None:
        self._status = status
        self._is_stream = content_type.startswith("text/event-stream")

    def on_data(self, data: bytes) -> None:
        if self._status != 200 or not self._is_stream:
            self._rest += data[: MAX_ERROR_BODY - len(self._rest)]
            return
        now = self._now()
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > MAX_LINE:
            self._error, rest = "too long a line", b""
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now)

    def _on_event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError:
            self._error = "unreadable event"
            return
        if event.error is not None:
            self._error = f"stream{_named(event.error)}"
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content
            if text:
                self._meter.chunk(self._exchange, now)
                if self._keeps_text:
                    self._texts.append(text)

    def _count(self, usage: _Usage) -> None:
        exchange, details = self._exchange, usage.prompt_tokens_details
        exchange.num_prompt_tokens = usage.prompt_tokens
        exchange.num_output_tokens = usage.completion_tokens
        exchange.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0


def _code_of(body: bytes) -> str:
    try:
        problem = _decode_refusal(body).error
    except msgspec.DecodeError:
        return ""
    return _named(problem) if isinstance(problem, _Problem) else ""


def _named(problem: _Problem) -> str:
    name = problem.code if problem.code is not None else problem.type
    return f" {str(name)[:40]}" if name else ""
