"""Whether a call may come in, and which model it gets, before anything is paid for it."""

import hashlib
import math
import random
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from headrace_router.admission import MAX_RETRY_AFTER_S, retry_after
from headrace_router.call import Call
from headrace_router.call_options import CallOptions
from headrace_router.capacities import Capacities
from headrace_router.forecast import Estimate
from headrace_router.models import Models, ServedModel
from headrace_router.overflow import Overflow
from headrace_router.own_requests import rank_of_call
from headrace_router.preparation import Endpoint, Parsed, Prepared
from headrace_router.promises import DIGEST_BYTES, Promises
from headrace_router.queue_limits import Depth, Obstacle, QueueLimits, Refusal, judge
from headrace_router.queue_metrics import QueueMetrics
from headrace_router.queue_watch import QueueWatch
from headrace_shared.errors import Overloaded

MIN_RETRY_S = 1.0
JITTER = 0.2
_WORDS = {
    Obstacle.FULL: "The queue is full.",
    Obstacle.WAIT: "The wait would be too long.",
    Obstacle.DEADLINE: "The answer would come after the request's deadline.",
}


class RefusalStatuses(NamedTuple):
    """HTTP statuses."""

    queue_full: Literal[429, 503, 529] = 429
    overloaded: Literal[429, 503, 529] = 503


class GateSettings(NamedTuple):
    limits: QueueLimits
    statuses: RefusalStatuses
    request_timeout_s: float
    no_worker_patience_s: float


class Admitted(NamedTuple):
    model: ServedModel
    instead_of: str | None = None
    """The model that was asked for, where a smaller one is to answer."""


class _Verdict(NamedTuple):
    estimate: Estimate | None
    refusal: Refusal | None


class Gate:
    def __init__(
        self,
        models: Models,
        watch: QueueWatch,
        capacities: Capacities,
        promises: Promises,
        overflow: Overflow,
        metrics: QueueMetrics,
        settings: GateSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._watch = watch
        self._capacities = capacities
        self._promises = promises
        self._overflow = overflow
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._seen_at: dict[str, float] = {}
        """When a model last had a worker, or the prospect of one."""
        self._began_at = clock()
        watch.retry_after_s = self._retry_after_s

    async def admit(self, parsed: Parsed, call: Call, options: CallOptions, *, may_overflow: bool = True) -> Admitted:
        """Raises ModelNotFound or Overloaded."""
        model = await self._models.find(parsed.model, self._left_s(call, options))
        name = model.card.model
        self._check_workers(name)
        digest = b""
        is_returning = False
        if len(self._promises):
            digest = _digest(parsed, call)
            is_returning = self._promises.is_due(digest, self._clock())
        verdict = self._judge(model, parsed, call, options, is_returning=is_returning)
        first_s = None if verdict.estimate is None else verdict.estimate.first_token_s
        is_overflowing = self._overflow.update(name, first_s)
        wants_smaller = options.overflow or call.identity.overflow or bool(parsed.body.overflow)
        # Another model knows nothing of what an adapter was trained for, and its embeddings lie in another space.
        may_overflow = may_overflow and model.adapter is None and parsed.endpoint is not Endpoint.EMBEDDING
        if may_overflow and wants_smaller and (is_overflowing or verdict.refusal is not None):
            smaller = self._smaller(parsed, call, options, verdict, is_returning=is_returning)
            if smaller is not None:
                self._metrics.overflowed(name, smaller.card.model)
                return Admitted(smaller, name)
        if verdict.refusal is not None:
            raise self._refused(verdict.refusal, name, parsed, call, digest)
        if is_returning:
            self._keep(digest, name, "kept")
        return Admitted(model)

    def on_tokenized(self, parsed: Parsed, prepared: Prepared) -> None:
        num_tokens = sum(len(prompt.ids) // 4 for prompt in prepared.encoded)
        self._watch.tokenized(prepared.model.card.model, parsed.size, num_tokens)

    def _smaller(
        self, parsed: Parsed, call: Call, options: CallOptions, large: _Verdict, *, is_returning: bool
    ) -> ServedModel | None:
        """The largest of the smaller ones that is quicker and may be asked; None if there is none."""
        for name in self._overflow.smaller(parsed.model):
            model = self._models.known(name)
            if model is None or not call.identity.may_ask(name) or not self._capacities.num_ready(name, self._clock()):
                continue
            verdict = self._judge(model, parsed, call, options, is_returning=is_returning)
            if verdict.refusal is not None:
                continue
            if (
                large.refusal is None
                and large.estimate is not None
                and verdict.estimate is not None
                and verdict.estimate.first_token_s >= large.estimate.first_token_s
            ):
                continue
            return model
        return None

    def _judge(
        self, model: ServedModel, parsed: Parsed, call: Call, options: CallOptions, *, is_returning: bool
    ) -> _Verdict:
        name, size, context = model.card.model, parsed.size, model.card.context
        identity = call.identity
        # Whoever asks for more than the context is to hear just that, and costs nobody more than the context meanwhile.
        num_tokens = min(self._watch.num_tokens(name, size), size.num_prompts * context)
        max_tokens = min(size.max_tokens or max(1, context - round(num_tokens / size.num_prompts)), context)
        rank = rank_of_call(identity.lane(options.lane), identity.priority)
        estimate = self._watch.estimate(
            name, num_tokens, size.num_choices, max_tokens, rank, identity.tenant, identity.weight
        )
        queue = self._watch.queue(name)
        answer_tokens = queue.own.lengths.expect(max_tokens).mean * size.num_choices
        refusal = judge(
            estimate,
            queue.depth,
            Depth(size.num_prompts, num_tokens + answer_tokens),
            self._settings.limits,
            left_s=self._left_s(call, options),
            margin=queue.calibration.margin,
            spacing_s=queue.spacing_s,
            is_returning=is_returning,
            others_bear_s=queue.others_bear_s,
        )
        return _Verdict(estimate, refusal)

    def _left_s(self, call: Call, options: CallOptions) -> float:
        wanted_s = min(self._settings.request_timeout_s, options.timeout_s or math.inf)
        return wanted_s - (self._clock() - call.arrived_at)

    def _check_workers(self, name: str) -> None:
        """Raises Overloaded for a model that has had no worker for long, where nobody is there to start one."""
        now = self._clock()
        if self._capacities.has_prospect(name, now):
            self._seen_at[name] = now
        elif now - self._seen_at.get(name, self._began_at) > self._settings.no_worker_patience_s:
            self._metrics.refused(name, "no_worker")
            raise Overloaded(
                "No worker serves this model now.",
                retry_after_s=retry_after(30.0),
                code="no_worker",
                status=self._settings.statuses.overloaded,
            )

    def _refused(self, refusal: Refusal, name: str, parsed: Parsed, call: Call, digest: bytes) -> Overloaded:
        now = self._clock()
        if not self._capacities.num_ready(name, now):
            self._models.miss(name)  # nothing is queued, and yet somebody should start a worker
        digest = digest or _digest(parsed, call)
        self._keep(digest, name, "broken")
        queue = self._watch.queue(name)
        if refusal.obstacle is Obstacle.DEADLINE:
            queue.refused(refusal.borne_s, now)
        wait_s = self._promises.book(name, digest, max(MIN_RETRY_S, refusal.free_in_s), queue.spacing_s, now)
        self._watch.promised(name, digest, wait_s)
        self._metrics.refused(name, refusal.obstacle.value)
        statuses = self._settings.statuses
        status = statuses.queue_full if refusal.obstacle is Obstacle.FULL else statuses.overloaded
        words = _WORDS[refusal.obstacle]
        if refusal.expected_s:
            words += f" It is expected in {refusal.expected_s:.0f} s."
        return Overloaded(words, retry_after_s=self._retry_after_s(wait_s), code=refusal.obstacle.value, status=status)

    def _keep(self, digest: bytes, name: str, outcome: str) -> None:
        """If the caller was told to come now, it has."""
        if self._promises.keep(digest, self._clock()):
            self._watch.kept(digest)
            self._metrics.promise(name, outcome)

    def _retry_after_s(self, wait_s: float) -> float:
        """Later than promised at most: who comes too early would be refused again."""
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_S, wait_s) * random.uniform(1.0, 1.0 + JITTER))


def _digest(parsed: Parsed, call: Call) -> bytes:
    """The same for the same body from the same caller."""
    head = f"{call.identity.owner}\0{parsed.endpoint.value}\0".encode()
    return hashlib.blake2b(parsed.given.digest, key=hashlib.sha256(head).digest(), digest_size=DIGEST_BYTES).digest()
