"""What is found of a choice's text and function calls while it comes in pieces. Pure."""

from typing import NamedTuple

from headrace_router.tools import ToolUse


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


def open_tail(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
