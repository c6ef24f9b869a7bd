"""Answers in the words of OpenAI's chat completions and completions. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType

from headrace_router import sse
from headrace_router.call_record import AnswerForm
from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.http_errors import error_object
from headrace_router.positions import Position
from headrace_router.responses import Formatter, UsageObject, to_json, usage_object
from headrace_shared.errors import RequestError


class ChunkWriter:
    """Implements `Writer`."""

    headers: Mapping[str, str] = {}
    result = b""

    def __init__(
        self,
        form: AnswerForm,
        formatter: Formatter,
        position: Position | None,
        told: Position | None,
        num_choices: int,
    ) -> None:
        """`position`: at the beginning of the answer, where events are to have ids; `told`: what the client has been
        told before."""
        self._form = form
        self._formatter = formatter
        self._told = told
        self._position = position
        self._gathered: dict[int, ChoiceDelta] = {}
        """By choice: what waits for more to make a chunk."""
        self._num_sent = [0] * num_choices
        """Tokens in chunks."""

    @property
    def ping(self) -> bytes:
        return sse.BLANK if self._position is None else sse.PING

    @property
    def model(self) -> str:
        return self._formatter.model

    def begin(self) -> bytes:
        """Nothing: whoever measures takes the first chunk for the first token."""
        return b""

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        parts = []
        for event in deltas:
            gathered = self._gather(event)
            if gathered is not None:
                parts.append(self._write(gathered))
        return b"".join(parts)

    def end(self, usage: Usage) -> bytes:
        if not self._form.include_usage or (self._told is not None and self._told.has_usage):
            return sse.DONE
        if self._position is not None:
            self._position.has_usage = True
        return sse.event(to_json(self._formatter.usage_chunk(usage_object(usage))), self._id()) + sse.DONE

    def failure(self, error: RequestError, shown_id: str) -> bytes:
        # No more will come of what was to be a chunk.
        rest = b"".join(map(self._write, self._gathered.values()))
        return rest + sse.event(to_json({"error": error_object(error, shown_id)})) + sse.DONE

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        return to_json(self._formatter.whole(deltas, usage_object(usage)))

    def _write(self, event: ChoiceDelta) -> bytes:
        usage: UsageObject | UnsetType | None = None if self._form.include_usage else UNSET
        if event.usage is not None:
            usage = usage_object(event.usage)
        # What was told before is formatted too: the formatter remembers what it has begun.
        chunk = self._formatter.chunk(event, usage)
        is_finished = event.delta.finish is not None
        if self._position is not None:
            self._position.advance(event.choice, event.num_tokens, is_finished=is_finished)
        if chunk is None or (
            self._told is not None and self._told.covers(event.choice, event.num_tokens, is_finished=is_finished)
        ):
            return b""
        return sse.event(to_json(chunk), self._id())

    def _gather(self, event: ChoiceDelta) -> ChoiceDelta | None:
        """None until there is enough for a chunk."""
        interval = self._form.stream_interval
        if interval == 1:
            return event
        is_finished = event.delta.finish is not None
        if self._told is not None and self._told.covers(event.choice, event.num_tokens, is_finished=is_finished):
            # A chunk ends where the client's knowledge does.
            self._num_sent[event.choice] = event.num_tokens
            return event
        before = self._gathered.pop(event.choice, None)
        event = event if before is None else before.then(event)
        num_sent = self._num_sent[event.choice]
        if num_sent and not is_finished and event.num_tokens - num_sent < interval:
            self._gathered[event.choice] = event
            return None
        self._num_sent[event.choice] = event.num_tokens
        return event

    def _id(self) -> str | None:
        return None if self._position is None else self._position.to_id()
