"""Function calls as Mistral's newer models write them: [TOOL_CALLS]name[ARGS]{…}, in text that comes in pieces. Pure.

An id may stand between: [TOOL_CALLS]name[CALL_ID]abcdefghi[ARGS]{…}. Clients get ids of ours.
"""

import re

from headrace_router.call_scanner import JsonEnd
from headrace_router.call_sink import Sink, open_tail
from headrace_router.tools import MISTRAL_MARK

MAX_HEAD_CHARS = 256
"""Between the mark and the arguments."""
_HEAD = re.compile(r"\s*([A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]{1,64}\s*)?(?:\[ARGS\]\s*)?")


class NamedCalls:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._buffer = ""
        self._is_head = False
        """The buffer is behind a mark, and not known to be a call."""
        self._arguments: JsonEnd | None = None
        self._is_behind_call = False
        """Nothing but blanks has come since: they are nobody's text."""

    def push(self, text: str) -> None:
        self._buffer += text
        while self._step():
            pass

    def end(self) -> None:
        if self._arguments is None:
            self._show(MISTRAL_MARK + self._buffer if self._is_head else self._buffer)

    def _step(self) -> bool:
        """False: more text is needed."""
        if self._arguments is not None:
            return self._read_arguments(self._arguments)
        if self._is_head:
            return self._read_head()
        start = self._buffer.find(MISTRAL_MARK)
        if start >= 0:
            self._show(self._buffer[:start])
            self._buffer = self._buffer[start + len(MISTRAL_MARK) :]
            self._is_head = True
            return True
        shown = len(self._buffer) - open_tail(self._buffer, MISTRAL_MARK)
        if self._show(self._buffer[:shown]):
            self._buffer = self._buffer[shown:]
        return False

    def _read_head(self) -> bool:
        start = self._buffer.find("{", 0, MAX_HEAD_CHARS)
        if start < 0 and len(self._buffer) < MAX_HEAD_CHARS and MISTRAL_MARK not in self._buffer:
            return False
        self._is_head = False
        head = _HEAD.fullmatch(self._buffer[:start]) if start >= 0 else None
        if head is None or head[1] not in self._sink.names:
            self._show(MISTRAL_MARK)  # what is behind it may hold another one
            return True
        self._sink.begin(head[1])
        self._buffer = self._buffer[start:]
        self._arguments = JsonEnd()
        return True

    def _read_arguments(self, arguments: JsonEnd) -> bool:
        end = arguments.push(self._buffer)
        self._sink.argue(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._arguments = None
            self._is_behind_call = True
        return end is not None

    def _show(self, text: str) -> bool:
        """False: it is not known yet whose it is."""
        if self._is_behind_call and not text.strip():
            return False
        self._is_behind_call = False
        self._sink.show(text)
        return True
