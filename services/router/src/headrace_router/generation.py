"""One API call from the queue to its last token: the shell around `token_log` and `choices`.

`async with generation:` registers the requests and puts them into the queue, or finds those that somebody else has put
there and reads what there is of their answer; leaving the block in whatever way, before all choices are complete, tells
`leave`. A call with several prompts is several requests with one mailbox.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Self

import structlog

from headrace_router.admission import retry_after
from headrace_router.cancellation import Canceller, QueuedRequest
from headrace_router.choices import ChoiceDelta, Usage
from headrace_router.following import follow
from headrace_router.inflight import InFlightTable, Mailbox
from headrace_router.positions import Position
from headrace_router.prompt import Prompt
from headrace_router.submission import read_log, submit
from headrace_router.token_log import Verdict, split_frame
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, Overloaded, RequestError, ServiceFailure
from headrace_shared.messages import CancelReason, LogMessage, Outcome, RequestEnded, TokenFrame

log = structlog.get_logger(__name__)

REPAIR_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Before each look into the log for what is missing."""
LOOK_AFTER_S = 5.0
"""A silence of this length is looked into once: the last frames may have been lost."""
MAX_RECONNECT_DELAY_S = 1.0
"""After a reconnect all calls read the log, spread over this time."""
BUFFER_PER_CHOICE = 256


class Limits(NamedTuple):
    """Seconds, and for `buffer` events."""

    request_timeout_s: float
    stall_timeout_s: float
    publish_timeout_s: float
    buffer: int


class Generation:
    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        bus: Bus,
        table: InFlightTable,
        canceller: Canceller,
        limits: Limits,
        leave: Callable[[QueuedRequest, CancelReason], None] | None = None,
        follows: bool = False,
        told: Position | None = None,
        counts: bool = False,
    ) -> None:
        """`leave` is told of each request that is left incomplete; without it that is cancelled. `follows`: the
        requests are in the queue already, or beyond it. `told`: where deltas are to begin anew; those before are given
        too. `counts`: each delta carries the usage."""
        self._prompts = prompts
        self._by_id = {prompt.request.request_id: prompt for prompt in prompts}
        self._first_index = {
            prompt.request.request_id: i * prompt.request.num_choices for i, prompt in enumerate(prompts)
        }
        self._bus = bus
        self._table = table
        self._canceller = canceller
        self._limits = limits
        num_choices = sum(len(prompt.choices) for prompt in prompts)
        self._mailbox = Mailbox(limits.buffer + BUFFER_PER_CHOICE * num_choices)
        self._now = asyncio.get_running_loop().time
        self._deadline = self._now() + limits.request_timeout_s
        self._last_event_at = self._now()
        self._looked_after = self._last_event_at
        self._repair_at: float | None = None
        self._num_repairs = 0
        self._num_open = num_choices
        self._failure: RequestError | None = None
        self._reason = CancelReason.CLIENT
        self._leave = leave or canceller.abort
        self._follows = follows
        self._told = told
        self._counts = counts
        self._known: list[ChoiceDelta] = []
        self._sources = AsyncExitStack()

    @property
    def failure(self) -> RequestError | None:
        """Why the request ended without an answer, as far as is known."""
        return self._failure

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0 and not self._known

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(prompt.num_tokens for prompt in self._prompts),
            completion_tokens=sum(choice.num_tokens for prompt in self._prompts for choice in prompt.choices),
            cached_tokens=sum(prompt.num_cached or 0 for prompt in self._prompts),
        )

    async def __aenter__(self) -> Self:
        """Queues the requests. Raises Overloaded or PayloadTooLarge; then nothing of the call is left in the queue.
        Or finds them; raises InvalidRequest if nobody knows their answer any more."""
        self._unregister = [self._table.register(request_id, self._mailbox) for request_id in self._by_id]
        try:
            if self._follows:
                await self._follow()
            else:
                for prompt in self._prompts:
                    await submit(self._bus, prompt, self._mailbox, self._limits.publish_timeout_s)
        except asyncio.CancelledError:
            await self._close()
            raise
        except BaseException:
            # The client is told that it failed: there is nothing to come back to. What others queued is their business.
            self._leave = self._canceller.abort
            for prompt in self._prompts:
                prompt.may_be_queued = prompt.may_be_queued and not self._follows
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def next(self, timeout_s: float) -> list[ChoiceDelta]:
        """What has come; empty when the call is complete or the time is up. Raises RequestError when it has failed."""
        until = self._now() + timeout_s
        while True:
            deltas = self._known + self._absorb(self._mailbox.take())
            self._known = []
            if deltas or self.is_complete:
                return deltas
            self._check_health()
            if self._repair_at is not None and self._now() >= self._repair_at:
                if deltas := await self._repair():
                    return deltas
                continue
            if self._now() >= until:
                return []
            await self._mailbox.wait(min(until, self._next_alarm()))

    def _absorb(self, messages: Sequence[LogMessage]) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        for message in messages:
            prompt = self._by_id.get(message.request_id)
            if prompt is None:
                continue
            prompt.has_started = True
            self._last_event_at = self._now()
            if isinstance(message, RequestEnded):
                self._on_ended(prompt, message)
                continue
            if not 0 <= message.choice < len(prompt.cursors):
                log.warning("frame of an unknown choice", request_id=message.request_id, choice=message.choice)
                continue
            cursor = prompt.cursors[message.choice]
            verdict = cursor.judge(message)
            if verdict is Verdict.NEXT:
                deltas += self._push(prompt, cursor.advance(message))
            elif verdict is Verdict.GAP:
                self._on_gap(prompt)
        return deltas

    async def _follow(self) -> None:
        self._known = []
        async for events in follow(self._bus, self._prompts, self._table, self._mailbox, self._sources):
            self._known += self._absorb(events)
        # Whether frames reach us in a cluster of brokers from the first one on is not certain.
        self._repair_at = self._now() + REPAIR_DELAYS_S[-3]

    def _push(self, prompt: Prompt, frame: TokenFrame) -> list[ChoiceDelta]:
        if self._told is None:
            return [self._push_part(prompt, frame)]
        boundary = self._told.num_tokens[self._first_index[frame.request_id] + frame.choice]
        parts = split_frame(frame, boundary)
        # A stop string may end the choice in the first part.
        return [self._push_part(prompt, part) for part in parts if prompt.choices[frame.choice].finish is None]

    def _push_part(self, prompt: Prompt, frame: TokenFrame) -> ChoiceDelta:
        if prompt.num_cached is None and frame.choice == 0:
            prompt.num_cached = min(frame.num_cached, prompt.num_tokens)
        choice = prompt.choices[frame.choice]
        delta = choice.push(frame)
        if choice.finish is not None:
            self._num_open -= 1
            prompt.cursors[frame.choice].is_finished = True
            if frame.finish is None:  # by a stop string: the worker does not know yet
                self._canceller.stop_choice(prompt.request, frame.choice)
        return ChoiceDelta(
            self._first_index[frame.request_id] + frame.choice,
            delta,
            frame.index + len(frame.tokens),
            self.usage if self._counts else None,
        )

    def _on_ended(self, prompt: Prompt, ended: RequestEnded) -> None:
        prompt.has_ended = True
        if prompt.is_complete:
            return
        if ended.outcome is Outcome.FINISHED:
            self._on_gap(prompt)
        else:
            self._failure = _failure_of(ended)

    def _on_gap(self, prompt: Prompt) -> None:
        if not prompt.has_gap:
            prompt.has_gap = True
            log.warning("gap in a token stream", request_id=prompt.request.request_id)
        if self._repair_at is None:
            self._num_repairs = 0
            self._repair_at = self._now() + REPAIR_DELAYS_S[0]

    def _check_health(self) -> None:
        failure = self._failure or self._mailbox.failure
        if failure is not None:
            raise failure
        if self._mailbox.has_overflowed:
            raise ServiceFailure("The client reads too slowly.", code="client_too_slow")
        if self._mailbox.may_have_missed:
            self._mailbox.may_have_missed = False
            self._repair_at = self._now() + random.uniform(0.0, MAX_RECONNECT_DELAY_S)
            self._num_repairs = 0
        now = self._now()
        if now >= self._look_at():
            self._looked_after = self._last_event_at
            self._repair_at = now
        if now >= self._deadline:
            self._reason = CancelReason.DEADLINE
            raise ServiceFailure("The request took too long.", code="timeout")
        if now >= self._stalled_at() and self._repair_at is None:
            raise ServiceFailure("No token came for too long.", code="stalled")

    def _stalled_at(self) -> float:
        """Waiting in the queue is no stall; only what has started can stall."""
        if any(prompt.has_started and not prompt.is_complete for prompt in self._prompts):
            return self._last_event_at + self._limits.stall_timeout_s
        return float("inf")

    def _look_at(self) -> float:
        if self._looked_after == self._last_event_at or self._repair_at is not None:
            return float("inf")
        return self._stalled_at() - self._limits.stall_timeout_s + LOOK_AFTER_S

    def _next_alarm(self) -> float:
        repair_at = self._repair_at if self._repair_at is not None else float("inf")
        return min(self._deadline, self._stalled_at(), self._look_at(), repair_at)

    async def _repair(self) -> list[ChoiceDelta]:
        """Looks for missing tokens in the log."""
        deltas: list[ChoiceDelta] = []
        waiting = [prompt for prompt in self._prompts if not prompt.is_complete]
        for prompt in waiting:
            try:
                deltas += await self._repair_from_log(prompt)
            except BusError as error:
                log.warning("token log not readable", request_id=prompt.request.request_id, error=str(error))
                self._repair_at = self._now() + REPAIR_DELAYS_S[-1]
                return deltas
        self._num_repairs += 1
        incomplete = [prompt for prompt in waiting if prompt.has_gap and not prompt.is_complete]
        if not incomplete:
            self._repair_at = None
        elif self._num_repairs < len(REPAIR_DELAYS_S):
            self._repair_at = self._now() + REPAIR_DELAYS_S[self._num_repairs]
        else:
            self._failure = ServiceFailure("Tokens of the answer were lost.", code="tokens_lost")
            self._repair_at = None
        return deltas

    async def _repair_from_log(self, prompt: Prompt) -> list[ChoiceDelta]:
        frames, ended = await read_log(self._bus, prompt.request)
        deltas: list[ChoiceDelta] = []
        is_whole = True
        for number, cursor in enumerate(prompt.cursors):
            own = [frame for frame in frames if frame.choice == number]
            for frame in cursor.repair(own):
                deltas += self._push(prompt, frame)
            beyond = any(frame.index > cursor.next_index for frame in own if frame.attempt >= cursor.attempt)
            is_whole = is_whole and (cursor.is_finished or not beyond)
        if deltas or ended is not None:
            prompt.has_started = True
        if deltas:
            self._last_event_at = self._now()
        prompt.has_gap = not is_whole
        if ended is not None and not prompt.is_complete:
            self._on_ended(prompt, ended)
        return deltas

    async def _close(self) -> None:
        self._mailbox.close()
        for unregister in self._unregister:
            unregister()
        for prompt in self._prompts:
            if prompt.may_be_queued and not prompt.is_complete and not prompt.has_ended:
                self._leave(QueuedRequest(prompt.request, prompt.stream_sequence, prompt.has_started), self._reason)
        await self._sources.aclose()


def _failure_of(ended: RequestEnded) -> RequestError:
    message = ended.message or "The request could not be completed."
    match ended.outcome:
        case Outcome.SHED:
            return Overloaded(message, retry_after_s=retry_after(2.0), code=ended.code or "overloaded")
        case Outcome.EXPIRED:
            return ServiceFailure(message, code=ended.code or "timeout")
        case Outcome.CANCELLED:
            return ServiceFailure(ended.message or "The request was cancelled.", code=ended.code or "cancelled")
    return ServiceFailure(message, code=ended.code or "internal_error")
