"""Spans of a worker, made when a sequence is over from times that were noted anyway; never one for each token.

process grants.…    CONSUMER  admitted until over
  prefill           INTERNAL  first iteration with it until its first token
  decode            INTERNAL  until its last token
iteration           INTERNAL  a trace of its own, linked to the requests in it; at most one a second
"""

from collections.abc import Sequence

from headrace_shared.messages import Admission, WorkerId
from headrace_shared.subjects import grants_subject
from headrace_shared.trace_context import TraceContext
from headrace_shared.tracing import GRANTS_TEMPLATE, Tracing, Value, messaging, sampled_context, wall_time

MAX_LINKS = 64
PERIOD_S = 1.0


class StayTraces:
    def __init__(self, tracing: Tracing, worker_id: WorkerId) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._iteration_at = float("-inf")

    def stay(
        self,
        admission: Admission,
        times: tuple[float, float | None, float | None, float],
        num_tokens: int,
        ending: str,
        error: bool,
    ) -> None:
        """`times`, monotonic: admitted, first iteration, first token, over. `ending`: a finish reason, stopped or
        failed."""
        request = admission.request
        parent = sampled_context(request)
        if parent is None:
            return
        admitted_at, started_at, first_token_at, ended_at = times
        attributes = messaging(
            "process",
            GRANTS_TEMPLATE,
            grants_subject(self._worker_id),
            message__conversation_id=request.request_id,
        )
        more: dict[str, Value] = {
            "headrace.worker.id": self._worker_id,
            "headrace.choice": admission.choice,
            "headrace.attempt": admission.attempt,
            "headrace.ending": ending,
            "gen_ai.request.model": request.model,
            "gen_ai.usage.cache_read.input_tokens": admission.num_cached,
            "gen_ai.usage.output_tokens": num_tokens,
        }
        if started_at is not None:
            more["headrace.worker.wait"] = started_at - admitted_at
            more["gen_ai.latency.time_in_model_prefill"] = (first_token_at or ended_at) - started_at
        if first_token_at is not None:
            more["gen_ai.latency.time_in_model_decode"] = ended_at - first_token_at
        span = self._tracing.begin(
            f"process {GRANTS_TEMPLATE}", "consumer", parent, at=wall_time(admitted_at), attributes=attributes | more
        )
        # Its end comes first: what hangs on it must not be there without it.
        span.end(at=wall_time(ended_at), error="engine_failed" if error else None)
        num_known = (len(request.prompt) + len(admission.output)) // 4
        if started_at is not None:
            computed: dict[str, Value] = {"headrace.tokens": max(0, num_known - admission.num_cached)}
            self._part("prefill", span.context, started_at, first_token_at or ended_at, computed)
        if first_token_at is not None and num_tokens > 1:
            self._part("decode", span.context, first_token_at, ended_at, {"headrace.tokens": num_tokens - 1})

    def iteration(
        self, now: float, elapsed_s: float, attributes: dict[str, Value], admissions: Sequence[Admission]
    ) -> None:
        """`admissions`: of the sequences in it."""
        if now - self._iteration_at < PERIOD_S:
            return
        contexts = [context for admission in admissions if (context := sampled_context(admission.request)) is not None]
        if not contexts:
            return
        self._iteration_at = now
        attributes["headrace.worker.id"] = self._worker_id
        end = wall_time(now)
        span = self._tracing.begin(
            "iteration", "internal", None, at=end - elapsed_s, attributes=attributes, links=contexts[:MAX_LINKS]
        )
        span.end(at=end)

    def is_due(self, now: float) -> bool:
        """An iteration may be shown again."""
        return now - self._iteration_at >= PERIOD_S

    def _part(self, name: str, parent: TraceContext, start: float, end: float, attributes: dict[str, Value]) -> None:
        self._tracing.begin(name, "internal", parent, at=wall_time(start), attributes=attributes).end(at=wall_time(end))
