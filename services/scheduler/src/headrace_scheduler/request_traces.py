"""Spans of the requests that pass through this scheduler, made after the fact from what the shell sees anyway.

All hang on the context that travels with the request (`shared/tracing.py`): a scheduler that is killed leaves none of
them without a parent.

    queue                    INTERNAL  stored in the stream until taken
    receive requests.…       CLIENT    the pull that got it
    process requests.…       CONSUMER  taken until handed to the core; for a second delivery, one more
      place                  INTERNAL  waiting until granted to a worker; `preemption` and `migration`: the same, later
      ack requests.…         CLIENT    terminal event and acknowledgement
    process progress.…       CONSUMER  taken over with a worker that went on with it
"""

import time
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from headrace_scheduler.decisions import Adoption, EndedRequest
from headrace_shared.bus import Delivery
from headrace_shared.messages import Admission, Outcome, Request, RequestId, SchedulerId, SequenceSnapshot, WorkerId
from headrace_shared.subjects import progress_subject
from headrace_shared.trace_context import TraceContext
from headrace_shared.tracing import PROGRESS_TEMPLATE, REQUESTS_TEMPLATE, Tracing, Value, messaging, sampled_context


class Placement(NamedTuple):
    """Of a choice, as far as the last one tells what the next one is."""

    worker: WorkerId
    num_preemptions: int


class _Traced(NamedTuple):
    context: TraceContext
    placed: dict[int, Placement]
    """By choice."""


class RequestTraces:
    def __init__(
        self, tracing: Tracing, scheduler_id: SchedulerId, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracing = tracing
        self._scheduler_id = scheduler_id
        self._clock = clock
        self._traced: dict[RequestId, _Traced] = {}
        """Of requests that the core holds, and some that it did until the last `prune`."""

    def taken(self, request: Request, delivery: Delivery, pulled_at: float) -> None:
        """From the queue; the pull began at `pulled_at`, monotonic."""
        parent = sampled_context(request)
        if parent is None:
            return
        now = time.time()
        stored_at = min(now, delivery.published_at)
        about: dict[str, Value] = {
            "message__id": request.request_id,
            "message__conversation_id": request.request_id,
        }
        attributes = messaging("process", REQUESTS_TEMPLATE, delivery.subject, **about)
        attributes["headrace.delivery_count"] = delivery.num_delivered
        process = self._tracing.begin(f"process {REQUESTS_TEMPLATE}", "consumer", parent, at=now, attributes=attributes)
        process.end()
        self._traced[request.request_id] = _Traced(process.context, {})
        self._span("queue", parent, stored_at, now, {"gen_ai.latency.time_in_queue": now - stored_at})
        receive = self._tracing.begin(
            f"receive {REQUESTS_TEMPLATE}",
            "client",
            parent,
            at=max(stored_at, now - (self._clock() - pulled_at)),
            attributes=messaging("receive", REQUESTS_TEMPLATE, delivery.subject, **about),
        )
        receive.end(at=now)

    def adopted(self, worker: WorkerId, adoption: Adoption, snapshot: Iterable[SequenceSnapshot]) -> None:
        """A predecessor's requests came with the snapshot of their worker."""
        for entry in snapshot:
            request = entry.admission.request
            if request.request_id in adoption.adopted:
                self._adopted(worker, request)
            traced = self._traced.get(request.request_id)
            if traced is not None:
                traced.placed.setdefault(entry.admission.choice, Placement(worker, 0))

    def _adopted(self, worker: WorkerId, request: Request) -> None:
        parent = sampled_context(request)
        if parent is not None and request.request_id not in self._traced:
            attributes = messaging(
                "process",
                PROGRESS_TEMPLATE,
                progress_subject(self._scheduler_id),
                message__conversation_id=request.request_id,
            )
            attributes["headrace.worker.id"] = worker
            span = self._tracing.begin(f"process {PROGRESS_TEMPLATE}", "consumer", parent, attributes=attributes)
            span.end()
            self._traced[request.request_id] = _Traced(span.context, {})

    def placed(self, worker: WorkerId, admission: Admission, waited_s: float, num_preemptions: int) -> None:
        """Granted now, after a wait of `waited_s`."""
        traced = self._traced.get(admission.request.request_id)
        if traced is None:
            return
        before = traced.placed.get(admission.choice)
        traced.placed[admission.choice] = Placement(worker, num_preemptions)
        name = "place"
        attributes: dict[str, Value] = {
            "headrace.worker.id": worker,
            "headrace.choice": admission.choice,
            "headrace.attempt": admission.attempt,
            "headrace.blocks": len(admission.block_ids),
            "headrace.output_tokens": len(admission.output) // 4,
            "gen_ai.usage.cache_read.input_tokens": admission.num_cached,
        }
        if before is not None:
            name = "preemption" if num_preemptions > before.num_preemptions else "migration"
            attributes["headrace.worker.previous_id"] = before.worker
        now = time.time()
        self._span(name, traced.context, now - waited_s, now, attributes)

    def settled(self, ended: EndedRequest, took_s: float, is_settled: bool) -> None:
        """The terminal event is told and the message acknowledged, or all attempts at it have failed."""
        traced = self._traced.pop(ended.event.request_id, None)
        if traced is None:
            return
        outcome = ended.event.outcome
        attributes = messaging(
            "ack",
            REQUESTS_TEMPLATE,
            "REQUESTS",
            message__id=ended.event.request_id,
            message__conversation_id=ended.event.request_id,
        )
        attributes["headrace.outcome"] = outcome.value
        span = self._tracing.begin(
            f"ack {REQUESTS_TEMPLATE}", "client", traced.context, at=time.time() - took_s, attributes=attributes
        )
        error = (ended.event.code or outcome.value) if outcome in (Outcome.FAILED, Outcome.EXPIRED) else None
        span.end(error=error if is_settled else "not_settled")

    def prune(self, held: Container[RequestId]) -> None:
        """Forgets what nobody here will ever end."""
        for request_id in [request_id for request_id in self._traced if request_id not in held]:
            del self._traced[request_id]

    def _span(self, name: str, parent: TraceContext, start: float, end: float, attributes: dict[str, Value]) -> None:
        self._tracing.begin(name, "internal", parent, at=start, attributes=attributes).end(at=end)
