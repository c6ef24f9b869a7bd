"""One model's queue as this router sees it: what waits and runs anywhere, and when it will be served. Pure."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_router.arrivals import Arrivals, Kind
from headrace_router.calibration import MIN_WAIT_S, Calibration, relative_error
from headrace_router.forecast import Capacity, Estimate, Forecast, Mix, make_forecast
from headrace_router.own_requests import (
    BATCH_RANK,
    Own,
    OwnRequests,
    Prediction,
    Shed,
    Snapshot,
    flow_of,
    rank_of,
)
from headrace_router.peer_loads import PeerLoads
from headrace_router.prompt import Prompt
from headrace_router.queue_limits import FRESH_SHARE, QUEUED_S, Depth
from headrace_shared.fleet_messages import RouterLoad, WaitingGroup
from headrace_shared.messages import Lane, Request, RequestId, RouterId

OWN_GROUPS = 128
"""Of our own requests in the forecast: up to so many waiting ones are seen singly."""
HOPELESS = 0.5
"""A request is given up in the queue only if even this share of its expected wait is too long."""
BORNE_SHARE = 0.05
"""Of those who were refused for their deadline, who bear less than what is said of them."""
MIN_REFUSED, MAX_REFUSED = 20, 256
"""Fewer say nothing, and more are not remembered,"""
REFUSED_S = 60.0
"""nor longer than this."""
ENDING_REQUESTS, ENDING_FRACTION = 3, 20
"""So many, and one in so many, are between their end and its acknowledgement to the queue."""


class Place(NamedTuple):
    position: int
    """1: next."""
    first_token_s: float | None
    """None: not known."""


class Observed(NamedTuple):
    """A prediction and what became of it."""

    predicted_s: float
    actual_s: float

    @property
    def error(self) -> float:
        return relative_error(self.predicted_s, self.actual_s)


class ModelQueue:
    def __init__(self, router: RouterId, model: str, arrivals: Arrivals) -> None:
        """`arrivals` hears of all models' requests."""
        self._router = router
        self._model = model
        self._arrivals = arrivals
        self._mark = arrivals.mark(())
        self.own = OwnRequests()
        self.calibration = Calibration()
        self.forecast: Forecast | None = None
        self.made_at = float("-inf")
        self.touched_at = float("-inf")
        """When somebody last asked for it."""
        self._peers = PeerLoads()
        self._added = _Added()
        self._depth = Depth(0, 0.0)
        self._num_missing: tuple[int, int] = (0, 0)
        self._borne: deque[tuple[float, float]] = deque(maxlen=MAX_REFUSED)
        """When a call was refused for its deadline, and the longest wait that it bears."""
        self.others_bear_s = math.inf
        """The longest wait that most of those bear who are to come back."""

    @property
    def depth(self) -> Depth:
        """What waits for a first token."""
        return Depth(self._depth.num_requests + self._added.num_requests, self._depth.num_tokens + self._added.tokens)

    @property
    def spacing_s(self) -> float:
        """The fleet begins a request in so many seconds; 1 where that is not known."""
        if self.forecast is None:
            return 1.0
        return self.forecast.spacing_s * self.calibration.factor

    @property
    def token_s(self) -> float:
        return 0.0 if self.forecast is None else self.forecast.token_s

    def on_load(self, load: RouterLoad, now: float) -> None:
        self._peers.hear(load, now)

    def on_depth(self, num_requests: int) -> None:
        """Requests in the queue, delivered or not. Those that no router tells of twice in a row have lost theirs."""
        num_untold = round(self._arrivals.untold(self._mark, (self._model, True)))
        num_known = len(self.own) + self._peers.num_requests + num_untold
        num_ending = ENDING_REQUESTS + num_known // ENDING_FRACTION
        self._num_missing = (self._num_missing[1], max(0, num_requests - num_known - num_ending))

    def refresh(self, capacity_for: Callable[[Mix], Capacity | None], now: float) -> Snapshot:
        """Anew from what everybody says. How many requests a worker takes depends on what they are like."""
        snapshot = self.own.snapshot(OWN_GROUPS)
        self._peers.expire(now)
        waiting = snapshot.waiting + self._peers.waiting()
        running = snapshot.running + self._peers.running(self.token_s, now)
        mix = _mix_of(waiting, self.own.uncached_share) or self.own.mix
        if count := min(self._num_missing):
            prompt_tokens = mix.prompt_tokens / self.own.uncached_share
            tokens = round(prompt_tokens * count), round(mix.output_tokens * count)
            waiting = [WaitingGroup(0, 0, count, count, *tokens), *waiting]
        self._depth = Depth(
            sum(group.num_requests for group in waiting),
            float(sum(group.prompt_tokens + group.output_tokens for group in waiting)),
        )
        self.others_bear_s = self._low_of_borne(now)
        self._added = _Added()
        self._mark = self._arrivals.mark(self._peers.newest_sequences(now))
        self.made_at = now
        capacity = capacity_for(mix)
        if capacity is None:
            self.forecast = None
        else:
            self.forecast = make_forecast(waiting, running, capacity, mix, self.own.uncached_share)
        return snapshot

    def estimate(
        self, prompt_tokens: float, num_choices: int, max_tokens: int, rank: int, flow: str, weight: float, now: float
    ) -> Estimate | None:
        """Of a request that would come now; None if the fleet's speed is not known, or there is none."""
        if self.forecast is None:
            return None
        length = self.own.lengths.expect(max_tokens)
        tokens = prompt_tokens + num_choices * length.mean
        key = self.forecast.order.key_of_newcomer(rank, flow, weight, tokens)
        raw = self.forecast.newcomer(key, self._num_new(rank), prompt_tokens, length.mean, length.high)
        return _corrected(raw, now - self.made_at, self.calibration.factor)

    def refused(self, borne_s: float, now: float) -> None:
        """A call, for its deadline, which is told to come back. What bears no wait at all is for an empty queue."""
        if borne_s > 0.0:
            self._borne.append((now, borne_s))

    def _low_of_borne(self, now: float) -> float:
        while self._borne and now - self._borne[0][0] > REFUSED_S:
            self._borne.popleft()
        if len(self._borne) < MIN_REFUSED:
            return math.inf
        return sorted(borne_s for _, borne_s in self._borne)[int(BORNE_SHARE * len(self._borne))]

    def queued(self, prompt: Prompt, now: float, shed: Shed) -> Own:
        own = self.own.add(prompt, now, shed)
        request = prompt.request
        rank = rank_of(request)
        if own.sequence:
            self._arrivals.add(own.sequence, self._kind(rank))
        estimate = self.estimate(
            prompt.num_tokens,
            request.num_choices,
            request.stop.max_tokens,
            rank,
            flow_of(request),
            request.weight,
            now,
        )
        if estimate is not None:
            own.predicted = Prediction(estimate.first_token_s, self.calibration.factor)
        self._added.num_requests += 1
        self._added.num_batch += rank >= BATCH_RANK
        self._added.tokens += prompt.num_tokens + request.num_choices * own.length.mean
        return own

    def started(self, request_id: RequestId, now: float) -> Observed | None:
        """Returns how good the prediction was, if there was one and the wait was worth predicting."""
        own = self.own.get(request_id)
        if own is None:
            return None
        actual_s = self.own.started(own, now)
        predicted = own.predicted
        if predicted is None or max(predicted.first_token_s, actual_s) < MIN_WAIT_S:
            return None
        if own.prompt.request.lane is Lane.BATCH:  # whoever comes later goes before it: that says nothing of the others
            return None
        self.calibration.observe(predicted.first_token_s, actual_s, predicted.factor, now)
        return Observed(predicted.first_token_s, actual_s)

    def place(self, request: Request, sequence: int, num_prompt_tokens: int, now: float) -> Place:
        """Of a request that waits for its first token, here or at another router."""
        if self.forecast is None:
            return Place(self.depth.num_requests, None)
        rank = rank_of(request)
        num_ahead = self.forecast.num_ahead_of(rank, flow_of(request), sequence)
        if num_ahead is None:  # it came after the forecast was made
            num_new = self._arrivals.before(self._mark, sequence, self._kind(rank))
            num_ahead = self.forecast.num_waiting + round(num_new)
        first_s = self.forecast.first_token_s(num_ahead, num_prompt_tokens) * self.calibration.factor
        return Place(num_ahead + 1, max(0.0, first_s - (now - self.made_at)))

    def hopeless(self, snapshot: Snapshot, now: float) -> list[Own]:
        """Those that will surely not be through before their time is up, because of what is ahead of them."""
        if self.forecast is None:
            return []
        found = []
        for own in snapshot.oldest:
            request = own.prompt.request
            if request.timeout_s <= 0.0:
                continue
            place = self.place(request, own.sequence, own.prompt.num_tokens, now)
            left_s = own.queued_at + request.timeout_s - now
            if place.first_token_s is not None and HOPELESS * place.first_token_s > max(left_s, QUEUED_S):
                found.append(own)
        return found

    def room_in_s(self, own: Own) -> float:
        """Until one like this that comes then would be in time, if what waits is served and nothing comes."""
        if self.forecast is None:
            return 0.0
        first_s = self.forecast.first_token_s(self.forecast.num_waiting, own.prompt.num_tokens)
        return max(0.0, first_s * self.calibration.factor - FRESH_SHARE * own.prompt.request.timeout_s)

    def _num_new(self, rank: int) -> int:
        """Requests that came after the forecast was made and before a newcomer of this rank."""
        num_own = self._added.num_requests - (0 if rank >= BATCH_RANK else self._added.num_batch)
        return num_own + round(self._arrivals.untold(self._mark, self._kind(rank)))

    def _kind(self, rank: int) -> Kind:
        return self._model, rank >= BATCH_RANK

    def load(self, max_groups: int, promises: bytes) -> RouterLoad:
        """For the other routers."""
        snapshot = self.own.snapshot(max_groups)
        return RouterLoad(
            router=self._router,
            model=self._model,
            waiting=tuple(snapshot.waiting),
            running=tuple(snapshot.running),
            promises=promises,
            newest_sequence=self._arrivals.newest,
        )


class _Added:
    """Own requests since the forecast was made."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_batch = 0
        self.tokens = 0.0


def _mix_of(waiting: Sequence[WaitingGroup], uncached_share: float) -> Mix | None:
    num_choices = sum(group.num_choices for group in waiting)
    if not num_choices:
        return None
    return Mix(
        uncached_share * sum(group.prompt_tokens for group in waiting) / num_choices,
        max(1.0, sum(group.output_tokens for group in waiting) / num_choices),
    )


def _corrected(raw: Estimate, age_s: float, factor: float) -> Estimate:
    """Waits shrink while a forecast ages."""
    wait_s = max(0.0, raw.wait_s * factor - age_s)
    first_s = wait_s + (raw.first_token_s - raw.wait_s) * factor
    return Estimate(
        raw.num_ahead,
        wait_s,
        first_s,
        first_s + raw.total_s - raw.first_token_s,
        first_s + raw.long_total_s - raw.first_token_s,
    )
