"""What the token log tells about a request whose earlier owner, or whose worker, is gone."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.prefix_index import TOKEN_BYTES
from headrace_shared import codec
from headrace_shared.bus import Bus
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import FinishReason, LogMessage, Request, RequestEnded, RequestId, RouterId, TokenFrame
from headrace_shared.subjects import TOKENS, tokens_subject

MAX_LOG_MESSAGES = 200_000
"""Of one request; beyond that the rest is generated again."""

_NOTHING = ChoiceLog((), 0)

log = structlog.get_logger(__name__)


class RequestLog(NamedTuple):
    choices: dict[int, ChoiceLog]
    has_ended: bool
    is_unsure: bool = False
    """Of a part of the log: the whole may tell more. Some frames follow nothing that is there, or are of an attempt
    before the one that is known."""


async def read_log(bus: Bus, router: RouterId, request_id: RequestId, first: int = 0) -> RequestLog:
    """`first`: see `parse_log`. Raises BusError."""
    messages = await bus.read(TOKENS.name, tokens_subject(router, request_id), MAX_LOG_MESSAGES)
    return parse_log((message.data for message in messages), first)


async def read_beyond(bus: Bus, request: Request, known: Mapping[int, ChoiceLog], window: int) -> RequestLog:
    """What the log has beyond what is `known`, by choice. It is looked for among the last `window` messages of all
    logs: a long answer has thousands, and of those some are missing at most. Raises BusError."""
    subject = tokens_subject(request.router, request.request_id)
    last = await bus.last(TOKENS.name, subject)
    if last is None:
        return RequestLog({}, False)
    first = first_index(request)
    if first == 0 or (0 in known and known[0].output):
        start = max(1, last.stream_sequence - window)
        messages = await bus.read(TOKENS.name, subject, MAX_LOG_MESSAGES, start)
        found = parse_log((message.data for message in messages), known=known)
        if not found.is_unsure:
            return found
    return await read_log(bus, request.router, request.request_id, first)


def first_index(request: Request) -> int:
    """Where choice 0 begins in the log: before 0 if the prompt's log-probabilities are told there."""
    scores_prompt = request.sampling.num_prompt_logprobs is not None
    return 1 - len(request.prompt) // TOKEN_BYTES if scores_prompt else 0


def parse_log(payloads: Iterable[bytes], first: int = 0, known: Mapping[int, ChoiceLog] | None = None) -> RequestLog:
    """Puts the frames of all attempts together, as a router has that missed none of them. Only what follows index 0
    without a gap counts, in choice 0 what follows index `first`: the log may have lost its beginning. `known`: what the
    frames follow, by choice, and the latest attempt that anybody was given."""
    readings: dict[int, _Reading] = {}
    has_ended = False
    for payload in payloads:
        try:
            message: LogMessage = codec.decode(payload, LogMessage)
        except ProtocolError as error:
            log.warning("undecodable message in the token log", error=str(error))
            continue
        if isinstance(message, RequestEnded):
            has_ended = True
            continue
        choice = message.choice
        reading = readings.get(choice)
        if reading is None:
            before = (known or {}).get(choice, _NOTHING)
            reading = readings[choice] = _Reading(first if choice == 0 else 0, before)
        reading.take(message)
    return RequestLog(
        {choice: reading.result() for choice, reading in readings.items()},
        has_ended,
        any(reading.is_unsure for reading in readings.values()),
    )


class _Reading:
    """One choice, by the rules of the routers' cursors: of an index that was told twice the first time counts, and
    nothing of an attempt lower than the one that is listened to. A worker that was taken for lost may tell tokens, and
    even the end, when routers listen to another: going on from those would leave a gap, or end what nobody has got."""

    __slots__ = ("_attempt", "_before", "_finish", "_highest", "_output", "_passed_over", "is_unsure")

    def __init__(self, first: int, known: ChoiceLog) -> None:
        self._before = first
        """Up to 0: where the next of the prompt's tokens belongs."""
        self._output = list(known.output)
        self._attempt = known.attempt
        """That is listened to."""
        self._highest = 0
        self._finish: FinishReason | None = None
        self._passed_over: dict[int, tuple[int, int]] = {}
        """By index: attempt and token."""
        self.is_unsure = False

    def take(self, frame: TokenFrame) -> None:
        self._highest = max(self._highest, frame.attempt)
        end = frame.index + len(frame.tokens)
        has_news = end > self._next or (end == self._next and frame.finish is not None)
        if self._finish is not None or not has_news:
            return
        if frame.attempt < self._attempt:
            self._pass_over(frame)
            return
        self._fill(frame.index)
        if frame.index > self._next:
            self._pass_over(frame)
            return
        self._attempt = frame.attempt
        if frame.index < 0:
            self._before = min(0, end)
            return
        self._output += frame.tokens[len(self._output) - frame.index :]
        self._finish = frame.finish

    def result(self) -> ChoiceLog:
        return ChoiceLog(tuple(self._output), self._highest, self._finish)

    @property
    def _next(self) -> int:
        return self._before if self._before < 0 else len(self._output)

    def _pass_over(self, frame: TokenFrame) -> None:
        self.is_unsure = True
        for index, token in enumerate(frame.tokens, start=frame.index):
            if frame.attempt >= self._passed_over.get(index, (0, 0))[0]:
                self._passed_over[index] = frame.attempt, token

    def _fill(self, index: int) -> None:
        """An attempt begins where its scheduler knew all tokens before it. A router that lacks some of those looks them
        up in the log, and takes the ones of the highest attempt."""
        while 0 <= self._next < index and self._next in self._passed_over:
            self._output.append(self._passed_over[self._next][1])
