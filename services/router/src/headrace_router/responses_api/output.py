"""The output of a response while it grows: its items, and the events that tell of them. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from headrace_router.answer_pieces import CallBegins, Piece, TextPiece, part_id
from headrace_router.choices import TokenText
from headrace_router.logprob_objects import TokenObject

TokenFormat = Callable[[Sequence[TokenText]], list[TokenObject]]
EndStatus = Literal["completed", "incomplete"]


class Told(NamedTuple):
    kind: str
    fields: dict[str, Any]


class Output:
    def __init__(self, response_id: str, token_format: TokenFormat | None) -> None:
        """`token_format`: None if no log-probabilities are shown."""
        self._response_id = response_id
        self._token_format = token_format
        self.items: list[dict[str, Any]] = []
        """Those that are done."""
        self._open: _Message | _FunctionCall | None = None

    def push(self, piece: Piece) -> Iterator[Told]:
        match piece:
            case TextPiece():
                if not isinstance(self._open, _Message):
                    yield from self._close("completed")
                    self._open = message = _Message(self._next_id("msg"), len(self.items))
                    yield from message.begin()
                assert isinstance(self._open, _Message)
                tokens = self._token_format(piece.tokens) if self._token_format is not None else []
                if piece.text or tokens:
                    yield self._open.push(piece.text, tokens)
            case CallBegins():
                yield from self._close("completed")
                call_id = part_id("call", self._response_id, len(self.items))
                self._open = _FunctionCall(self._next_id("fc"), call_id, len(self.items), piece.name)
                yield self._open.begin()
            case _:
                assert isinstance(self._open, _FunctionCall), "arguments of no call"
                yield self._open.push(piece.text)

    def end(self, status: EndStatus) -> Iterator[Told]:
        """An answer without anything is an empty message."""
        if self._open is None:
            yield from self.push(TextPiece(""))
        yield from self._close(status)

    def so_far(self) -> list[dict[str, Any]]:
        """With the open item."""
        return self.items + ([] if self._open is None else [self._open.item("incomplete")])

    def _close(self, status: EndStatus) -> Iterator[Told]:
        if self._open is None:
            return
        done = self._open.item(status)
        yield from self._open.end(done)
        yield Told("response.output_item.done", {"output_index": len(self.items), "item": done})
        self.items.append(done)
        self._open = None

    def _next_id(self, prefix: str) -> str:
        return part_id(prefix, self._response_id, len(self.items))


class _Message:
    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._where = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._text: list[str] = []
        self._logprobs: list[TokenObject] = []

    def begin(self) -> Iterator[Told]:
        item = {"id": self._id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield Told("response.output_item.added", {"output_index": self._where["output_index"], "item": item})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield Told("response.content_part.added", {**self._where, "part": part})

    def push(self, text: str, logprobs: list[TokenObject]) -> Told:
        self._text.append(text)
        self._logprobs += logprobs
        return Told("response.output_text.delta", {**self._where, "delta": text, "logprobs": logprobs})

    def end(self, done: dict[str, Any]) -> Iterator[Told]:
        (part,) = done["content"]
        told = {**self._where, "text": part["text"], "logprobs": part["logprobs"]}
        yield Told("response.output_text.done", told)
        yield Told("response.content_part.done", {**self._where, "part": part})

    def item(self, status: EndStatus) -> dict[str, Any]:
        text = "".join(self._text)
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": msgspec.to_builtins(self._logprobs)}
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [part]}


class _FunctionCall:
    def __init__(self, item_id: str, call_id: str, index: int, name: str) -> None:
        self._id = item_id
        self._call_id = call_id
        self._name = name
        self._where = {"item_id": item_id, "output_index": index}
        self._arguments: list[str] = []

    def begin(self) -> Told:
        item = {**self.item("completed"), "status": "in_progress"}
        return Told("response.output_item.added", {"output_index": self._where["output_index"], "item": item})

    def push(self, arguments: str) -> Told:
        self._arguments.append(arguments)
        return Told("response.function_call_arguments.delta", {**self._where, "delta": arguments})

    def end(self, done: dict[str, Any]) -> Iterator[Told]:
        told = {**self._where, "name": self._name, "arguments": done["arguments"]}
        yield Told("response.function_call_arguments.done", told)

    def item(self, status: EndStatus) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }
