"""Answers in the words of the Responses API: typed events with numbers, or one object. Pure.

The events of a background response have the same numbers wherever and however often they are written: each is made of
at most one token. That is what `starting_after` rests on.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace_router import sse
from headrace_router.answer_pieces import AnswerPieces
from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.field_names import renamed
from headrace_router.responses_api.output import EndStatus, Output, TokenFormat
from headrace_router.responses_api.response_object import About, Facts, Status, error_of, response_object
from headrace_router.responses_api.translation import FIELD_NAMES
from headrace_router.tools import ToolUse
from headrace_router.typed_events import typed_event
from headrace_shared.errors import InvalidRequest, RequestError
from headrace_shared.messages import FinishReason

CANCELLED = "cancelled"
"""The code of a failure that somebody wanted."""


class ResponseWriter:
    """Implements `writer.Writer`."""

    headers: Mapping[str, str] = {}
    ping = sse.BLANK

    def __init__(
        self,
        about: About,
        facts: Facts,
        tools: ToolUse | None,
        token_format: TokenFormat | None,
        clock: Callable[[], float],
        starting_after: int = -1,
    ) -> None:
        """`clock`: seconds since the epoch. Events up to the number `starting_after` are not told again."""
        self._about = about
        self._facts = facts
        self._clock = clock
        self._starting_after = starting_after
        self._pieces = AnswerPieces(tools)
        self._output = Output(facts.response_id, token_format)
        self._number = 0
        self._is_in_progress = False
        self._finish: FinishReason | None = None
        self._result = b""

    @property
    def model(self) -> str:
        return self._facts.model

    @property
    def result(self) -> bytes:
        return self._result

    def begin(self) -> bytes:
        if not self._about.background:
            started = self._object("in_progress", [])
            return self._event("response.created", response=started) + self._progress()
        queued = self._object("queued", [])
        return self._event("response.created", response=queued) + self._event("response.queued", response=queued)

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        parts = []
        for event in deltas:
            if not self._is_in_progress:
                parts.append(self._progress())
            parts.append(self._push(event.delta))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        is_cut = self._finish is FinishReason.LENGTH
        status: EndStatus = "incomplete" if is_cut else "completed"
        parts = [self._event(told.kind, **told.fields) for told in self._output.end(status)]
        final = self._object(
            status,
            self._output.items,
            usage=usage,
            incomplete_reason="max_output_tokens" if is_cut else None,
            completed_at=None if is_cut else int(self._clock()),
        )
        self._result = msgspec.json.encode(final)
        return b"".join([*parts, self._event(f"response.{status}", response=final), sse.DONE])

    def failure(self, error: RequestError, shown_id: str) -> bytes:
        if error.code == CANCELLED:
            final = self._object("cancelled", self._output.so_far())
            self._result = msgspec.json.encode(final)
            # There is no event of its own for it.
            return self._event("response.incomplete", response=final) + sse.DONE
        if isinstance(error, InvalidRequest):
            error = renamed(error, FIELD_NAMES)
        final = self._object("failed", self._output.so_far(), error=error_of(error))
        self._result = msgspec.json.encode(final)
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        return told + self._event("response.failed", response=final) + sse.DONE

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        (parts,) = deltas
        for delta in parts:
            self._push(delta)
        self.end(usage)
        return self._result

    def _push(self, delta: Delta) -> bytes:
        if delta.finish is not None:
            self._finish = delta.finish
        return b"".join(
            self._event(told.kind, **told.fields)
            for piece in self._pieces.push(delta)
            for told in self._output.push(piece)
        )

    def _progress(self) -> bytes:
        self._is_in_progress = True
        return self._event("response.in_progress", response=self._object("in_progress", []))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self._starting_after:
            return b""
        return typed_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _object(self, status: Status, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return response_object(self._about, self._facts, status, output, **fields)
