"""One choice's answer as a row of parts, texts and function calls, for the APIs that tell them apart. Pure."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from headrace_router.call_reader import CallReader
from headrace_router.choices import Delta, TokenText
from headrace_router.tools import ToolUse


class TextPiece(NamedTuple):
    text: str
    tokens: tuple[TokenText, ...] = ()


class CallBegins(NamedTuple):
    number: int
    name: str


class ArgumentsPiece(NamedTuple):
    text: str
    """Of the arguments of the last call that began."""


Piece = TextPiece | CallBegins | ArgumentsPiece


class AnswerPieces:
    """How the text is cut into deltas makes no difference to what the pieces add up to."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._reader = None if tools is None else CallReader(tools)
        self._tokens: list[TokenText] = []
        """Of text that is held back."""

    @property
    def has_calls(self) -> bool:
        return self._reader is not None and self._reader.num_calls > 0

    def push(self, delta: Delta) -> Iterator[Piece]:
        if self._reader is None:
            if delta.text or delta.tokens:
                yield TextPiece(delta.text, delta.tokens)
            return
        self._tokens += delta.tokens
        for piece in self._reader.push(delta.text, is_last=delta.finish is not None).pieces:
            tokens, self._tokens = tuple(self._tokens), []
            if isinstance(piece, str):
                yield TextPiece(piece, tokens)
                continue
            # Tokens of calls are nobody's text.
            if piece.name is not None:
                yield CallBegins(piece.number, piece.name)
            if piece.arguments:
                yield ArgumentsPiece(piece.arguments)


def part_id(prefix: str, answer_id: str, number: int) -> str:
    """The same wherever the answer is written."""
    return f"{prefix}_{hashlib.sha256(f'{answer_id}/{number}'.encode()).hexdigest()[:24]}"
