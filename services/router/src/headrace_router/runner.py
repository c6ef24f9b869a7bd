"""Carries out plans: queues or finds the requests, answers, counts, and tidies up as the client's leaving asks for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import structlog

from headrace_router.accounts import NOT_RUN
from headrace_router.active_calls import ActiveCalls
from headrace_router.admission import QueueHealth, admit, admit_inputs, no_answer, refusal
from headrace_router.answering import Reply, StreamCut, StreamFailed, answer_stream, answer_whole
from headrace_router.attachments import Attachments
from headrace_router.call import Call, Plan
from headrace_router.call_meter import CallMeter
from headrace_router.call_record import record_of
from headrace_router.call_store import CallStore
from headrace_router.cancellation import Canceller, QueuedRequest
from headrace_router.generation import Generation, Limits
from headrace_router.http_errors import to_request_error
from headrace_router.inflight import InFlightTable
from headrace_router.queue_watch import Tracker
from headrace_router.unattended import Unattended
from headrace_router.writers import make_writer
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, QueueFull, RequestError, ServiceFailure
from headrace_shared.messages import Audience, CancelReason, FinishReason, RequestId

log = structlog.get_logger(__name__)


MAX_REPORTS_PER_S = 500
"""About so many places in the queue are told each second."""


class CallSettings(NamedTuple):
    limits: Limits
    max_inflight: int
    ping_interval_s: float
    shares_cache: bool = False
    queue_report_interval_s: float = 1.0
    queue_full_status: int = 429


class EndedWithoutAnswer(Exception):
    """The call that is to be continued failed, or was cancelled."""


class Runner:
    def __init__(
        self,
        *,
        bus: Bus,
        table: InFlightTable,
        canceller: Canceller,
        attachments: Attachments,
        unattended: Unattended,
        store: CallStore,
        tracker: Tracker,
        settings: CallSettings,
    ) -> None:
        self._bus = bus
        self._table = table
        self._canceller = canceller
        self._attachments = attachments
        self._unattended = unattended
        self._store = store
        self._tracker = tracker
        self._settings = settings
        self.active = ActiveCalls()
        self.queue_health = QueueHealth(time.monotonic)

    @property
    def num_active(self) -> int:
        """Requests whose clients are waiting here."""
        return len(self._table)

    def admit(self) -> None:
        """Raises Overloaded. Asked before any work is done for a call."""
        is_reachable = self._bus.disconnected_for_s < self._settings.limits.publish_timeout_s
        admit(len(self._table), self._settings.max_inflight, is_reachable=is_reachable)

    async def run(
        self,
        call: Call,
        plan: Plan,
        *,
        may_begin_anew: bool = False,
        on_refusal: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Raises RequestError or BusError before the first byte, or StreamCut. `may_begin_anew`: raises
        EndedWithoutAnswer, if the plan follows a call that failed and its client was told nothing of it. `on_refusal`
        is awaited if nothing was queued."""
        try:
            generation = self._generation(call, plan)
        except ServiceFailure:
            if on_refusal is not None:
                await on_refusal()
            raise
        meter = call.meter
        meter.begun(plan, call.identity.owner)
        is_queued = has_tried = False
        try:
            if not plan.follows and not self.queue_health.may_try():
                raise no_answer()
            has_tried = True
            if len(plan.prompts) > 1 and plan.prompts[0].request.embeds and not plan.follows:
                admit_inputs(len(plan.prompts), len(self._table), self._settings.max_inflight)
            with self._attached(plan), self.active.add(call, plan, generation):
                async with generation:
                    is_queued = True
                    meter.queued()
                    if generation.failure is not None and may_begin_anew and plan.told is None:
                        raise EndedWithoutAnswer
                    await self._answer(call, plan, generation, meter)
            meter.outcome = "finished"
        except (RequestError, BusError) as error:
            if not is_queued and on_refusal is not None:
                await on_refusal()
            if isinstance(error, QueueFull):
                meter.outcome = "queue_full"
                raise refusal(error, self._settings.queue_full_status) from error
            meter.outcome = to_request_error(error).code
            if meter.outcome == "unavailable" and has_tried:
                self.queue_health.failed()
            raise
        except StreamFailed as failed:
            meter.outcome = failed.code
        except asyncio.CancelledError:
            if is_queued and plan.prompts[0].request.audience is Audience.NONE:
                self._unattended.watch(plan, call.charge)
            raise
        except (StreamCut, EndedWithoutAnswer) as end:
            meter.outcome = "cut" if isinstance(end, StreamCut) else "repeated"
            raise
        finally:
            usage = generation.usage
            self._settle(call, plan, generation, is_queued=is_queued)
            num_told = sum(plan.told.num_tokens) if plan.told is not None else usage.completion_tokens
            finishes = [choice.finish for prompt in plan.prompts for choice in prompt.choices]
            meter.ended(usage, num_told if plan.follows else 0, was_cut_short=FinishReason.LENGTH in finishes)
            if call.trace is not None:
                call.trace.end(meter.outcome, plan.request_id, usage, finishes, meter.first_token_s)
            log.debug("call ended", request_id=plan.request_id, outcome=meter.outcome, **usage._asdict())

    async def _answer(self, call: Call, plan: Plan, generation: Generation, meter: CallMeter) -> None:
        if not plan.follows:
            self.queue_health.succeeded()
        held_id = await self._held_id(call, plan, generation)
        reply = Reply(
            request_id=plan.request_id,
            shown_id=call.shown_id,
            send=call.send,
            writer=make_writer(call, plan),
            num_choices=plan.num_choices,
            on_token=meter.on_token,
            ping_interval_s=self._settings.ping_interval_s,
            is_resumable=plan.sends_ids or plan.form.by_token,
            held_id=held_id,
            queue_report_interval_s=self._report_interval_s(),
            tells_queue=plan.tells_queue,
            comments_queue=plan.comments_queue,
            keep=call.keeper.answered if call.keeper is not None else None,
        )
        await (answer_stream if plan.form.stream else answer_whole)(reply, generation)

    async def _held_id(self, call: Call, plan: Plan, generation: Generation) -> RequestId | None:
        """None: the client cannot come back."""
        if not plan.is_held:
            return None
        record = record_of(call.identity.owner, plan.created, plan.form, plan.prompts)
        if call.keeper is not None:
            try:
                await call.keeper.queued(record)
            except (RequestError, BusError, asyncio.CancelledError):
                # Nobody can ask for what was not stored. What is repeated is the first call's to end.
                if not plan.follows:
                    generation.forsake()
                raise
        if not plan.follows:
            try:
                await self._store.save(record)
            except BusError as error:
                log.warning("call not recorded: it cannot be resumed", request_id=plan.request_id, error=str(error))
                return None
        return plan.request_id

    def _generation(self, call: Call, plan: Plan) -> Generation:
        """Raises ServiceFailure if its time is up already."""
        limits = self._settings.limits
        left_s = plan.timeout_s - (time.monotonic() - call.arrived_at)
        if left_s <= 0.0:
            raise ServiceFailure("The request took too long.", code="timeout")
        return Generation(
            plan.prompts,
            bus=self._bus,
            table=self._table,
            canceller=self._canceller,
            limits=limits._replace(request_timeout_s=left_s, publish_timeout_s=min(left_s, limits.publish_timeout_s)),
            leave=self._leave,
            follows=plan.follows,
            told=plan.told,
            counts=plan.form.include_usage and plan.form.continuous_usage,
            by_token=plan.form.by_token,
            tracker=self._tracker,
            trace=call.trace,
            form_param=plan.form.form_param,
        )

    def _report_interval_s(self) -> float:
        """Longer where many wait: reports must not take the time that answers need."""
        return self._settings.queue_report_interval_s * max(1.0, len(self._table) / MAX_REPORTS_PER_S)

    def _settle(self, call: Call, plan: Plan, generation: Generation, *, is_queued: bool) -> None:
        """What the caller pays for. What goes on without its client is paid for in advance."""
        if plan.follows or not is_queued:
            call.charge.settle(0, NOT_RUN)
            return
        # What never began has used nothing.
        usage = generation.usage
        num_used = usage.prompt_tokens + usage.completion_tokens if generation.has_begun else 0
        goes_on = plan.is_held and not generation.is_complete and generation.failure is None
        call.charge.settle(max(num_used, call.charge.num_tokens) if goes_on else num_used)

    def _attached(self, plan: Plan) -> AbstractContextManager[None]:
        if not plan.is_held:
            return nullcontext()
        return self._attachments.attached([prompt.request.request_id for prompt in plan.prompts])

    def _leave(self, queued: QueuedRequest, reason: CancelReason) -> None:
        match queued.request.audience:
            case Audience.ATTACHED:
                self._attachments.leave(queued, reason)
            case Audience.ROUTER:
                self._canceller.abort(queued, reason)
            case Audience.NONE if reason is not CancelReason.CLIENT:
                self._canceller.abort(queued, reason)
