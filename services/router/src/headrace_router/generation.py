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
from headrace_router.call_trace import CallTrace
from headrace_router.cancellation import Canceller, QueuedRequest
from headrace_router.choices import ChoiceDelta, Usage
from headrace_router.following import follow
from headrace_router.inflight import InFlightTable, Mailbox
from headrace_router.model_queue import Place
from headrace_router.outcome_errors import error_of
from headrace_router.positions import Position
from headrace_router.prompt import Prompt
from headrace_router.queue_watch import Tracker
from headrace_router.submission import are_queued, read_log, submit
from headrace_router.token_log import Verdict, single_tokens, split_frame
from headrace_router.watchdog import NEVER, Watchdog
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, Overloaded, RequestError, ServiceFailure
from headrace_shared.messages import CancelReason, LogMessage, Outcome, RequestEnded, RequestId, TokenFrame

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 1.0
"""After following began: whether frames reach us from the first one on is not certain in a cluster of brokers."""
MAX_KNOWN = 256
"""Deltas of a log that are handed out at once: writing them all would hold up the streams of others."""
MAX_TAKEN = 256
"""Events of a mailbox that are worked off before others have a turn."""
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
        by_token: bool = False,
        tracker: Tracker | None = None,
        trace: CallTrace | None = None,
        form_param: str = "",
    ) -> None:
        """`leave` is told of each request that is left incomplete; without it that is cancelled. `follows`: the
        requests are in the queue already, or beyond it. `told`: where deltas are to begin anew; those before are given
        too. `counts`: each delta carries the usage. `by_token`: each delta is of one token.
        `tracker` hears of what is queued here, and may give up what still waits. `form_param`: the field that asks for
        a form of the answer."""
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
        self._watchdog = Watchdog(self._now(), limits.request_timeout_s, limits.stall_timeout_s)
        self._num_open = num_choices
        self._has_more = False
        self._running: set[RequestId] = set()
        """Of a call with thousands of prompts, those that have begun and are not complete."""
        self._failure: RequestError | None = None
        self._reason = CancelReason.CLIENT
        self._leave = leave or canceller.abort
        self._follows = follows
        self._told = told
        self._counts = counts
        self._by_token = by_token
        self._tracker = tracker
        self._has_heard = False
        self._is_queued = True
        self._trace = trace
        self._form_param = form_param
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
            cached_tokens=sum(prompt.told_cached for prompt in self._prompts),
        )

    @property
    def has_begun(self) -> bool:
        """There have been events of at least one request."""
        # What others have queued counts as started from the beginning, for whoever would take it out of the queue.
        return self._has_heard or (not self._follows and any(prompt.has_started for prompt in self._prompts))

    @property
    def place(self) -> Place | None:
        """In the queue, of the request that is next; None once one has begun."""
        tracker, prompts = self._tracker, self._prompts
        if tracker is None or self.has_begun:
            return None
        places = [
            tracker.place(prompt.request, prompt.stream_sequence, prompt.num_tokens)
            for prompt in prompts
            if prompt.stream_sequence is not None
        ]
        return min(places, key=lambda place: place.position, default=None)

    def forsake(self) -> None:
        """Nobody will come for the answer: what is left incomplete is cancelled."""
        self._leave = self._canceller.abort

    def _shed(self, failure: RequestError) -> None:
        """Ends the call unless it has begun."""
        if not self.has_begun:
            self._reason = CancelReason.SHED
            self._mailbox.fail(failure)

    async def __aenter__(self) -> Self:
        """Queues the requests. Raises Overloaded or PayloadTooLarge; then nothing of the call is left in the queue.
        Or finds them; raises InvalidRequest if nobody knows their answer any more."""
        self._unregister = [self._table.register(request_id, self._mailbox) for request_id in self._by_id]
        try:
            if self._follows:
                await self._follow()
            else:
                for prompt in self._prompts:
                    await submit(self._bus, prompt, self._mailbox, self._limits.publish_timeout_s, self._trace)
                    if self._tracker is not None:
                        self._tracker.queued(prompt, self._shed)
        except asyncio.CancelledError:
            await self._close()
            raise
        except BaseException:
            # The client is told that it failed: there is nothing to come back to. What others queued is their business.
            self.forsake()
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
            if self._has_more:  # a reader that finds something each time never gives way
                await asyncio.sleep(0)
            if self._known:
                deltas = self._known[:MAX_KNOWN]
                del self._known[:MAX_KNOWN]
                self._has_more = True
                return deltas
            messages = self._mailbox.take(MAX_TAKEN)
            self._has_more = len(messages) == MAX_TAKEN
            deltas = self._absorb(messages)
            if deltas or self._num_open == 0:
                return deltas
            if self._has_more:
                continue
            now = self._now()
            alarm = min(until, self._watchdog.next_alarm())
            if now < alarm and self._failure is None and not self._mailbox.is_troubled:
                await self._mailbox.wait(alarm)
                continue
            self._check_health(now)
            if now >= self._watchdog.look_at:
                if deltas := await self._look():
                    return deltas
            elif self._watchdog.is_stalled(now):
                if deltas := await self._ask_queue():
                    return deltas
            elif now >= until:
                return []

    def _absorb(self, messages: Sequence[LogMessage]) -> list[ChoiceDelta]:
        deltas: list[ChoiceDelta] = []
        is_alive = False
        for message in messages:
            prompt = self._by_id.get(message.request_id)
            if prompt is None:
                continue
            self._has_heard = True
            if not prompt.has_started:
                self._on_started(prompt)
            if isinstance(message, RequestEnded):
                is_alive = True
                self._on_ended(prompt, message)
                continue
            if not 0 <= message.choice < len(prompt.cursors):
                log.warning("frame of an unknown choice", request_id=message.request_id, choice=message.choice)
                continue
            cursor = prompt.cursors[message.choice]
            # An attempt that was given up may talk on: that is no sign of the one we listen to.
            is_alive = is_alive or message.attempt >= cursor.attempt
            verdict = cursor.judge(message)
            if verdict is Verdict.NEXT:
                self._push(prompt, cursor.advance(message), deltas)
            elif verdict is Verdict.GAP:
                self._on_gap(prompt)
        if is_alive:
            self._watchdog.on_event(self._now())
        return deltas

    async def _follow(self) -> None:
        async for events in follow(self._bus, self._prompts, self._table, self._mailbox, self._sources):
            self._known += self._absorb(events)
        self._watchdog.look_in(LOOK_AGAIN_S, self._now())
        for prompt in self._prompts:
            self._note_running(prompt)

    def _push(self, prompt: Prompt, frame: TokenFrame, deltas: list[ChoiceDelta]) -> None:
        if frame.index < 0:
            prompt.scores += frame.logprobs
            return
        if self._by_token:
            parts = single_tokens(frame)
        elif self._told is not None:
            boundary = self._told.num_tokens[self._first_index[frame.request_id] + frame.choice]
            parts = split_frame(frame, boundary)
        else:
            deltas.append(self._push_part(prompt, frame))
            return
        for part in parts:
            if prompt.choices[frame.choice].finish is None:  # else: a stop string ended it in the first part
                deltas.append(self._push_part(prompt, part))

    def _push_part(self, prompt: Prompt, frame: TokenFrame) -> ChoiceDelta:
        if prompt.num_cached is None and frame.choice == 0:
            prompt.num_cached = min(frame.num_cached, prompt.num_tokens)
        choice = prompt.choices[frame.choice]
        number = self._first_index[frame.request_id] + frame.choice
        delta = choice.push(frame) if self._trace is None else self._trace.detokenized(number, choice, frame)
        if choice.finish is not None:
            self._num_open -= 1
            prompt.cursors[frame.choice].is_finished = True
            self._note_running(prompt)
            if frame.finish is None and not prompt.has_ended:  # by a stop string: the worker does not know yet
                self._canceller.stop_choice(prompt.request, frame.choice)
        return ChoiceDelta(
            number,
            delta,
            frame.index + len(frame.tokens),
            self.usage if self._counts else None,
        )

    def _on_started(self, prompt: Prompt) -> None:
        prompt.has_started = True
        if self._tracker is not None and not self._follows:
            self._tracker.started(prompt)
        self._note_running(prompt)

    def _note_running(self, prompt: Prompt) -> None:
        if prompt.has_started and not prompt.is_complete:
            self._running.add(prompt.request.request_id)
        else:
            self._running.discard(prompt.request.request_id)
        self._watchdog.is_running = bool(self._running)

    def _on_ended(self, prompt: Prompt, ended: RequestEnded) -> None:
        prompt.has_ended = True
        if prompt.is_complete:
            return
        if ended.outcome is Outcome.FINISHED:
            self._on_gap(prompt)
        else:
            self._failure = error_of(ended, self._form_param)

    def _on_gap(self, prompt: Prompt) -> None:
        if not prompt.has_gap:
            prompt.has_gap = True
            log.warning("gap in a token stream", request_id=prompt.request.request_id)
        self._watchdog.on_gap(self._now())

    def _check_health(self, now: float) -> None:
        mailbox = self._mailbox
        failure = self._failure or mailbox.failure
        if failure is not None:
            raise failure
        if mailbox.has_overflowed:
            raise ServiceFailure("The client reads too slowly.", code="client_too_slow")
        if mailbox.may_have_missed:
            mailbox.may_have_missed = False
            self._watchdog.look_in(random.uniform(0.0, MAX_RECONNECT_DELAY_S), now)
        if mailbox.has_lost_queue:
            mailbox.has_lost_queue = self._is_queued = False
            if not all(prompt.has_started for prompt in self._prompts):
                raise Overloaded("The broker has lost the request.", retry_after_s=retry_after(1.0), code="unavailable")
        if self._watchdog.check(now):
            self._reason = CancelReason.DEADLINE
            raise ServiceFailure("The request took too long.", code="timeout")

    async def _ask_queue(self) -> list[ChoiceDelta]:
        """Nothing has come for long. What the queue still holds is somebody's work, or will be, however slow that is:
        it is taken out only after the request's end. What it does not hold has ended, and if the log says nothing of
        that, nobody ever will."""
        running = [self._by_id[request_id] for request_id in self._running]
        are_held = self._is_queued and await are_queued(self._bus, running)
        self._watchdog.on_event(self._now())
        if are_held:
            return []
        deltas = await self._look()
        if not deltas and self._failure is None and self._watchdog.look_at == NEVER:
            self._failure = ServiceFailure("No token came for too long.", code="stalled")
        return deltas

    async def _look(self) -> list[ChoiceDelta]:
        """Looks for missing tokens in the log."""
        deltas: list[ChoiceDelta] = []
        waiting = [prompt for prompt in self._prompts if not prompt.is_complete]
        for prompt in waiting:
            try:
                deltas += await self._repair_from_log(prompt)
            except BusError as error:
                log.warning("token log not readable", request_id=prompt.request.request_id, error=str(error))
                self._watchdog.on_failed_look(self._now())
                return deltas
        found_all = all(prompt.is_complete or not prompt.has_gap for prompt in waiting)
        if not self._watchdog.on_look(self._now(), found_all=found_all):
            self._failure = ServiceFailure("Tokens of the answer were lost.", code="tokens_lost")
        return deltas

    async def _repair_from_log(self, prompt: Prompt) -> list[ChoiceDelta]:
        frames, ended = await read_log(self._bus, prompt.request)
        deltas: list[ChoiceDelta] = []
        is_whole = True
        for number, cursor in enumerate(prompt.cursors):
            own = [frame for frame in frames if frame.choice == number]
            for frame in cursor.repair(own):
                self._push(prompt, frame, deltas)
            beyond = any(frame.index > cursor.next_index for frame in own if frame.attempt >= cursor.attempt)
            is_whole = is_whole and (cursor.is_finished or not beyond)
        if deltas or ended is not None:
            self._has_heard = True
            if not prompt.has_started:
                self._on_started(prompt)
        if deltas:
            self._watchdog.on_event(self._now())
        prompt.has_gap = not is_whole
        if ended is not None and not prompt.is_complete:
            self._on_ended(prompt, ended)
        return deltas

    async def _close(self) -> None:
        self._mailbox.close()
        for unregister in self._unregister:
            unregister()
        for prompt in self._prompts:
            if self._tracker is not None and not self._follows:
                self._tracker.closed(prompt)
            if prompt.may_be_queued and not prompt.is_complete and not prompt.has_ended:
                self._leave(QueuedRequest(prompt.request, prompt.stream_sequence, prompt.has_started), self._reason)
        await self._sources.aclose()
