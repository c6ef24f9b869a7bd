"""The requests of this router that are in the queue or on a worker, and what was predicted for each. Pure."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace_router.answer_lengths import AnswerLengths, Length
from headrace_router.forecast import Mix
from headrace_router.prompt import Prompt
from headrace_router.queue_order import runs_of
from headrace_shared.errors import RequestError
from headrace_shared.fleet_messages import RunningGroup, WaitingGroup
from headrace_shared.messages import Lane, Request, RequestId

BATCH_RANK = 1 << 16
"""Behind all classes of the interactive lane."""
MIX_MEMORY = 0.05
TTFT_WINDOW_S = 30.0
MAX_TTFTS = 2000
MIN_RUNNING_GROUPS = 16

Shed = Callable[[RequestError], None]
"""Ends a request that still waits."""


class Prediction(NamedTuple):
    first_token_s: float
    """After it was queued."""
    factor: float
    """By which it had been corrected."""


class Own:
    """One of them."""

    __slots__ = ("length", "predicted", "prompt", "queued_at", "shed")

    def __init__(self, prompt: Prompt, length: Length, queued_at: float, shed: Shed) -> None:
        self.prompt = prompt
        self.length = length
        self.queued_at = queued_at
        self.shed = shed
        self.predicted: Prediction | None = None

    @property
    def sequence(self) -> int:
        return self.prompt.stream_sequence or 0


class Snapshot(NamedTuple):
    waiting: list[WaitingGroup]
    running: list[RunningGroup]
    oldest: list[Own]
    """Those that wait, in the order of `waiting`."""


class OwnRequests:
    """Of one model."""

    def __init__(self) -> None:
        self._all: dict[RequestId, Own] = {}
        self.lengths = AnswerLengths()
        self._prompt_tokens = 256.0
        self._output_tokens = 0.0
        self.uncached_share = 1.0
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_TTFTS)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def mix(self) -> Mix:
        """Tokens of an average request."""
        return Mix(self._prompt_tokens * self.uncached_share, self._output_tokens or 64.0)

    def expected(self, request: Request) -> Length:
        """Of one choice."""
        return self.lengths.expect(request.stop.max_tokens, request.stop.min_tokens)

    def add(self, prompt: Prompt, now: float, shed: Shed) -> Own:
        own = Own(prompt, self.expected(prompt.request), now, shed)
        self._all[prompt.request.request_id] = own
        self._prompt_tokens += MIX_MEMORY * (prompt.num_tokens - self._prompt_tokens)
        output = own.length.mean * prompt.request.num_choices
        self._output_tokens += (MIX_MEMORY if self._output_tokens else 1.0) * (output - self._output_tokens)
        return own

    def get(self, request_id: RequestId) -> Own | None:
        return self._all.get(request_id)

    def started(self, own: Own, now: float) -> float:
        """The first token is there; returns how long it took."""
        waited_s = now - own.queued_at
        if own.prompt.request.lane is Lane.INTERACTIVE:  # who may wait says nothing about how long others do
            self._ttfts.append((now, waited_s))
        return waited_s

    def remove(self, request_id: RequestId) -> None:
        """It has ended, or its client has gone."""
        own = self._all.pop(request_id, None)
        if own is None:
            return
        prompt = own.prompt
        for choice in prompt.choices:
            if choice.finish is not None:
                self.lengths.observe(prompt.request.stop.max_tokens, choice.num_tokens)
        if prompt.num_cached is not None and prompt.num_tokens:
            share = 1.0 - prompt.num_cached / prompt.num_tokens
            self.uncached_share += MIX_MEMORY * (max(0.02, share) - self.uncached_share)

    def ttft_p95_s(self, now: float) -> float | None:
        """Of the requests that began of late; None if there were none."""
        recent = sorted(seconds for at, seconds in self._ttfts if now - at <= TTFT_WINDOW_S)
        return recent[min(len(recent) - 1, round(0.95 * len(recent)))] if recent else None

    def waiting(self) -> list[Own]:
        """By rank, flow and stream sequence."""
        waits = [own for own in self._all.values() if not own.prompt.has_started and own.sequence]
        waits.sort(key=lambda own: (rank_of(own.prompt.request), flow_of(own.prompt.request), own.sequence))
        return waits

    def snapshot(self, max_groups: int) -> Snapshot:
        """At most `max_groups` of each kind, and one more for each rank and flow."""
        waits = self.waiting()
        groups: list[WaitingGroup] = []
        for flow in _by_flow(waits):
            num_runs = max(1, max_groups * len(flow) // max(1, len(waits)))
            groups += [_group(run) for run in runs_of(flow, num_runs)]
        return Snapshot(groups, self._running(max_groups), waits)

    def _running(self, max_groups: int) -> list[RunningGroup]:
        left = []
        for own in self._all.values():
            if own.prompt.has_started:
                stop = own.prompt.request.stop
                left += [
                    self.lengths.left(stop.max_tokens, choice.num_tokens, stop.min_tokens)
                    for choice in own.prompt.choices
                    if choice.finish is None
                ]
        runs = runs_of(sorted(left), max(MIN_RUNNING_GROUPS, max_groups))
        return [RunningGroup(len(run), round(sum(run) / len(run))) for run in runs]


def rank_of(request: Request) -> int:
    """Lower ones are served first."""
    return rank_of_call(request.lane, request.priority)


def rank_of_call(lane: Lane, priority: int) -> int:
    return BATCH_RANK if lane is Lane.BATCH else -priority


def flow_of(request: Request) -> str:
    return request.tenant


def _by_flow(waits: Iterable[Own]) -> list[list[Own]]:
    flows: dict[tuple[int, str], list[Own]] = {}
    for own in waits:
        request = own.prompt.request
        flows.setdefault((rank_of(request), flow_of(request)), []).append(own)
    return list(flows.values())


def _group(run: list[Own]) -> WaitingGroup:
    first = run[0].prompt.request
    return WaitingGroup(
        rank_of(first),
        run[-1].sequence,
        len(run),
        sum(own.prompt.request.num_choices for own in run),
        sum(own.prompt.num_tokens for own in run),
        max(1, round(sum(own.length.mean * own.prompt.request.num_choices for own in run))),
        flow_of(first),
        first.weight,
    )
