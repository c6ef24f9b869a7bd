"""Finds the function calls in a choice's text while it comes in pieces. Pure.

Where the pieces are cut makes no difference to what is found. What may still belong to a call is held back; what turns
out to be none is given out after all, so that no text is lost.
"""

from typing import NamedTuple, Protocol

from headrace_router.call_scanner import CallScanner, ScanState
from headrace_router.tools import CallFormat, ToolUse

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"
_MARK = "[TOOL_CALLS]"
"""Mistral's, where special tokens are shown."""
_BETWEEN = " \t\r\n;,[]"
"""Characters around bare calls."""


PIECE_CHARS = 1024


class CallPiece(NamedTuple):
    number: int
    """Of the call in the choice."""
    name: str | None
    """Where the call begins."""
    arguments: str


class Found(NamedTuple):
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    """At most one for each call."""
    pieces: tuple[str | CallPiece, ...] = ()
    """Both, in the order in which the model wrote them."""


class Sink:
    """What was found since it was last taken."""

    def __init__(self, use: ToolUse) -> None:
        self.names = frozenset(use.names)
        self.first_name = use.names[0] if use.names else ""
        self._is_parallel = use.is_parallel
        self._text: list[str] = []
        self._calls: dict[int, CallPiece] = {}
        self._order: list[str | int] = []
        """Texts, and numbers of calls."""
        self.num_calls = 0

    def show(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._order.append(text)

    def begin(self, name: str) -> None:
        self.num_calls += 1
        self._add(CallPiece(self.num_calls - 1, name, ""))

    def argue(self, arguments: str) -> None:
        """More of the arguments of the last call that began."""
        if arguments:
            known = self._calls.get(self.num_calls - 1, CallPiece(self.num_calls - 1, None, ""))
            self._add(known._replace(arguments=known.arguments + arguments))

    def take(self) -> Found:
        pieces = tuple(entry if isinstance(entry, str) else self._calls[entry] for entry in self._order)
        found = Found("".join(self._text), tuple(self._calls.values()), pieces)
        self._text.clear()
        self._calls.clear()
        self._order.clear()
        return found

    def _add(self, piece: CallPiece) -> None:
        if piece.number == 0 or self._is_parallel:
            if piece.number not in self._calls:
                self._order.append(piece.number)
            self._calls[piece.number] = piece


class CallReader:
    """Of one choice."""

    def __init__(self, use: ToolUse) -> None:
        self._sink = Sink(use)
        kinds: dict[CallFormat, type[_Reader]] = {
            CallFormat.TAGGED: _Tagged,
            CallFormat.BARE: _Bare,
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
        held = _open_tail(self._buffer, _OPENING)
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
        if not rest.startswith(_MARK) and _MARK.startswith(rest):
            return ""
        rest = rest.removeprefix(_MARK).lstrip(_BETWEEN)
        if rest.startswith("{"):
            self._held = self._held[: len(self._held) - len(rest)]
            self._scan = _Scan(self._sink)
            return rest
        if rest:
            self._reject("")
        return ""

    def _reject(self, text: str) -> None:
        """Behind calls there is no text: what a model adds there is noise."""
        if not self._sink.num_calls:
            self._sink.show(self._held + text)
            self._is_text = True
        self._held, self._scan = "", None


def _open_tail(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
