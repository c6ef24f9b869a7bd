"""Finds the function calls in a choice's text while it comes in pieces. Pure.

Where the pieces are cut makes no difference to what is found. What may still belong to a call is held back; what turns
out to be none is given out after all, so that no text is lost.
"""

from typing import Protocol

from headrace_router.call_scanner import CallScanner, ScanState
from headrace_router.call_sink import Found, Sink, open_tail
from headrace_router.named_calls import NamedCalls
from headrace_router.tools import MISTRAL_MARK, CallFormat, ToolUse

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"
_BETWEEN = " \t\r\n;,[]"
"""Characters around bare calls."""

PIECE_CHARS = 1024
MAX_LEAD_CHARS = 1024
"""In front of bare calls. With more it is text: all of it is looked at whenever more comes."""


class CallReader:
    """Of one choice."""

    def __init__(self, use: ToolUse) -> None:
        self._sink = Sink(use)
        kinds: dict[CallFormat, type[_Reader]] = {
            CallFormat.TAGGED: _Tagged,
            CallFormat.BARE: _Bare,
            CallFormat.NAMED: NamedCalls,
            CallFormat.ARGUMENTS: _Arguments,
        }
        self._reader = kinds[use.format](self._sink)

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str, *, is_last: bool) -> Found:
        # What was taken for a call and is none is read again: of a whole answer at a time too much would be, too often.
        for start in range(0, len(text), PIECE_CHARS):
            self._reader.push(text[start : start + PIECE_CHARS])
        if is_last:
            self._reader.end()
        return self._sink.take()


class _Reader(Protocol):
    def __init__(self, sink: Sink) -> None: ...

    def push(self, text: str) -> None: ...

    def end(self) -> None: ...


class _Arguments:
    """All text is the arguments of the only function."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def push(self, text: str) -> None:
        if text:
            if not self._sink.num_calls:
                self._sink.begin(self._sink.first_name)
            self._sink.argue(text)

    def end(self) -> None:
        return


class _Scan:
    """A call that is being read."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._scanner = CallScanner(sink.names)

    def push(self, text: str) -> tuple[ScanState, str]:
        """(what it is by now; what is behind it once it is done, all of it if it is text)"""
        was_open = self._scanner.state is ScanState.OPEN
        arguments, rest = self._scanner.push(text)
        state = self._scanner.state
        if state in (ScanState.CALL, ScanState.DONE):
            if was_open:
                self._sink.begin(self._scanner.name)
            self._sink.argue(arguments)
        return state, self._scanner.text if state is ScanState.TEXT else rest

    @property
    def undecided(self) -> str | None:
        """None: it is a call."""
        return self._scanner.text if self._scanner.state is ScanState.OPEN else None


class _Tagged:
    """Calls between tags, in other text."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = ""
        self._lead: str | None = None
        """The opening tag and the blanks behind it, where they are the last that came."""
        self._scan: _Scan | None = None
        self._is_behind_call = False

    def push(self, text: str) -> None:
        self._buffer += text
        while self._step():
            pass

    def end(self) -> None:
        undecided = self._scan.undecided if self._scan is not None else ""
        if undecided is None:
            return
        rest = (self._lead or "") + undecided + self._buffer
        if not (self._is_behind_call and _CLOSING.startswith(rest.strip())):
            self._sink.show(rest)

    def _step(self) -> bool:
        """False: more text is needed."""
        if self._scan is not None:
            return self._step_in_call(self._scan)
        if self._lead is not None:
            return self._step_behind_tag(self._lead)
        if self._is_behind_call:
            return self._step_behind_call()
        start = self._buffer.find(_OPENING)
        if start >= 0:
            self._sink.show(self._buffer[:start])
            self._buffer = self._buffer[start + len(_OPENING) :]
            self._lead = _OPENING
            return True
        held = open_tail(self._buffer, _OPENING)
        self._sink.show(self._buffer[: len(self._buffer) - held])
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _step_in_call(self, scan: _Scan) -> bool:
        state, self._buffer = scan.push(self._buffer)
        if state is ScanState.TEXT:
            # There may be a call in it, which began before this one was known to be none.
            self._sink.show(self._lead or "")
        if state in (ScanState.TEXT, ScanState.DONE):
            self._is_behind_call = state is ScanState.DONE
            self._scan = self._lead = None
            return bool(self._buffer)
        return False

    def _step_behind_tag(self, lead: str) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith("{"):
            self._lead = lead + self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            self._scan = _Scan(self._sink)
            return True
        if not rest:
            return False
        self._sink.show(lead)
        self._lead = None
        return True

    def _step_behind_call(self) -> bool:
        """Blanks between calls, and the closing tag, are nobody's text."""
        rest = self._buffer.lstrip()
        if rest.startswith(_CLOSING):
            self._buffer = rest[len(_CLOSING) :]
            return bool(self._buffer)
        if _CLOSING.startswith(rest) or _OPENING.startswith(rest):
            return False
        self._is_behind_call = False
        if rest.startswith(_OPENING):
            self._buffer = rest
        return True


class _Bare:
    """Nothing but calls, or nothing but text."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = ""
        """In front of the first call."""
        self._scan: _Scan | None = None
        self._is_text = False

    def push(self, text: str) -> None:
        while text:
            if self._is_text:
                self._sink.show(text)
                return
            if self._scan is None:
                text = self._find(text)
                continue
            state, text = self._scan.push(text)
            if state is ScanState.TEXT:
                self._reject(text)
                if self._is_text:
                    return
                text = text[1:]  # a call may have begun before this was known to be none
            if state is ScanState.DONE:
                self._scan, self._held = None, ""

    def end(self) -> None:
        undecided = self._scan.undecided if self._scan is not None else ""
        if not self._sink.num_calls:
            self._sink.show(self._held + (undecided or ""))

    def _find(self, text: str) -> str:
        """The brace with which a call begins. Returns the text from there."""
        if self._sink.num_calls:
            start = text.find("{")
            if start < 0:
                return ""
            self._scan = _Scan(self._sink)
            return text[start:]
        self._held += text
        rest = self._held.lstrip()
        is_open = not rest.startswith(MISTRAL_MARK) and MISTRAL_MARK.startswith(rest)
        if not is_open:
            rest = rest.removeprefix(MISTRAL_MARK).lstrip(_BETWEEN)
        num_lead = len(self._held) - len(rest)
        if num_lead > MAX_LEAD_CHARS:
            self._reject("")
        elif is_open:
            return ""
        elif rest.startswith("{"):
            self._held = self._held[:num_lead]
            self._scan = _Scan(self._sink)
            return rest
        elif rest:
            self._reject("")
        return ""

    def _reject(self, text: str) -> None:
        """Behind calls there is no text: what a model adds there is noise."""
        if not self._sink.num_calls:
            self._sink.show(self._held + text)
            self._is_text = True
        self._held, self._scan = "", None
