"""When what waits will get its first token: the fleet played forward. Pure.

Workers run a fixed number of sequences at a time; a waiting one begins when one of them ends. So the forecast knows the
places, when each becomes free (by the tokens its sequence has left, or when a worker comes up), lets the waiting ones
take them in order, and computes their prompts one after the other at the fleet's speed. A place that is taken becomes
free again when the expected answer is through. What comes after the last one that waits is found by letting a few
average requests follow.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from headrace_router.queue_order import Flow, Key, Order, order_of
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.fleet_messages import RunningGroup, WaitingGroup

NUM_STEPS = 8
"""In about so many a group begins: places that become free one after the other are taken together. Ten thousand that
wait would else take fifty milliseconds."""
NUM_PHANTOMS = 24
"""Groups of average requests behind the last one that waits."""


class Capacity(NamedTuple):
    """The workers of one model."""

    num_ready: int
    num_places: int
    """Sequences that one worker runs at a time."""
    num_tokens: int
    """Most tokens that one iteration computes."""
    speed: EngineSpeed
    coming: tuple[float, ...] = ()
    """Seconds until each further worker is ready."""


class Mix(NamedTuple):
    """The average request that waits; of late, if none does."""

    prompt_tokens: float
    """Those that are computed: without what the prefix cache holds."""
    output_tokens: float


class Estimate(NamedTuple):
    """Of a request that comes now."""

    num_ahead: int
    """Requests that will be served before it."""
    wait_s: float
    """Until its prompt is begun."""
    first_token_s: float
    total_s: float
    """Until an answer of the expected length is through."""
    long_total_s: float
    """The same of an answer that is longer than most."""


class _Point(NamedTuple):
    num_requests: float
    """That have begun before."""
    begins_s: float


class Forecast:
    """As of the moment when it was made."""

    def __init__(
        self,
        order: Order,
        points: list[_Point],
        *,
        num_places: int,
        num_before: list[int],
        token_s: float,
        prompt_token_s: float,
        iteration_s: float,
        uncached_share: float,
    ) -> None:
        self._order = order
        self._points = points
        self._num_places = num_places
        self._positions = [point.num_requests for point in points]
        self._keys = [entry.key for entry in order.groups]
        self._num_before = num_before
        self.token_s = token_s
        """Between two tokens of a running sequence."""
        self._prompt_token_s = prompt_token_s
        self._iteration_s = iteration_s
        self._uncached_share = uncached_share
        self._flows: dict[Flow, tuple[list[int], list[int]]] = {}
        """Of each flow the groups' last sequences and positions in the order."""
        for index, entry in enumerate(order.groups):
            sequences, indexes = self._flows.setdefault((entry.group.rank, entry.group.flow), ([], []))
            sequences.append(entry.group.last_sequence)
            indexes.append(index)

    @property
    def spacing_s(self) -> float:
        """Behind what waits the fleet begins a request in so many seconds: as long as it takes until each place was
        taken once more, by the number of places."""
        last = self._points[-1]
        before_s = self.begins_s(last.num_requests - self._num_places)
        return max(1e-3, (last.begins_s - before_s) / self._num_places)

    @property
    def num_waiting(self) -> int:
        return self._num_before[-1]

    @property
    def order(self) -> Order:
        return self._order

    def num_before(self, index: int) -> int:
        """Requests before the group at this position of the order."""
        return self._num_before[index]

    def num_ahead_of(self, rank: int, flow: str, sequence: int) -> int | None:
        """Of a request that is in the queue; None if it was not there when the forecast was made."""
        sequences, indexes = self._flows.get((rank, flow), ([], []))
        found = bisect_left(sequences, sequence)
        return None if found == len(sequences) else self._num_before[indexes[found]]

    def begins_s(self, num_ahead: float) -> float:
        """When the request with so many ahead is begun."""
        points = self._points
        index = bisect_left(self._positions, num_ahead)
        if index == 0:
            return points[0].begins_s
        if index == len(points):
            return points[-1].begins_s + self.spacing_s * (num_ahead - points[-1].num_requests)
        before, after = points[index - 1], points[index]
        part = (num_ahead - before.num_requests) / max(1e-9, after.num_requests - before.num_requests)
        return before.begins_s + part * (after.begins_s - before.begins_s)

    def first_token_s(self, num_ahead: float, num_prompt_tokens: float) -> float:
        prompt_s = num_prompt_tokens * self._uncached_share * self._prompt_token_s
        return self.begins_s(num_ahead) + prompt_s + self._iteration_s

    def newcomer(
        self, key: Key, num_added: int, prompt_tokens: float, output_tokens: float, long_output_tokens: float
    ) -> Estimate:
        """`num_added`: requests that came before it and after the forecast was made."""
        num_ahead = self._num_before[bisect_left(self._keys, key)] + num_added
        first = self.first_token_s(num_ahead, prompt_tokens)
        return Estimate(
            num_ahead,
            self.begins_s(num_ahead),
            first,
            first + (output_tokens - 1) * self.token_s,
            first + (long_output_tokens - 1) * self.token_s,
        )


def make_forecast(
    waiting: Sequence[WaitingGroup],
    running: Sequence[RunningGroup],
    capacity: Capacity,
    mix: Mix,
    uncached_share: float = 1.0,
) -> Forecast | None:
    """None if there is no worker, and none is on its way. `uncached_share` of the prompts' tokens must be computed."""
    if capacity.num_ready == 0 and not capacity.coming:
        return None
    order = order_of(waiting)
    places = _Places(running, capacity)
    num_choices = sum(group.num_choices for group in waiting)
    # With nothing waiting a batch is as large as what runs; else as large as it can be.
    num_workers = max(1, capacity.num_ready)
    in_batch = min(float(capacity.num_places), max(1.0, (places.num_running + num_choices) / num_workers))
    speed = capacity.speed
    token_s = speed.iteration_s(in_batch, in_batch * mix.prompt_tokens / max(1.0, mix.output_tokens))
    room = max(1.0, capacity.num_tokens - in_batch)
    prompt_token_s = speed.iteration_s(in_batch, room) / room
    places.open(token_s)

    points: list[_Point] = []
    num_before = [0]
    begun = prompts_done_s = 0.0
    average = WaitingGroup(0, 0, 1, 1, round(mix.prompt_tokens / max(uncached_share, 1e-6)), round(mix.output_tokens))
    phantoms = _phantoms(average, places.num_places, num_choices)
    for number, group in enumerate([entry.group for entry in order.groups] + phantoms):
        taken = 0
        step = max(1, group.num_choices // NUM_STEPS)
        while taken < group.num_choices:
            free_at, count = places.take(min(step, group.num_choices - taken), group.num_choices - taken)
            begins_s = max(free_at, prompts_done_s)
            points.append(_Point(begun + group.num_requests * taken / group.num_choices, begins_s))
            part = count / group.num_choices
            prompt_s = part * group.prompt_tokens * uncached_share * prompt_token_s
            prompts_done_s = begins_s + prompt_s / places.num_workers_at(begins_s)
            first_s = max(prompts_done_s, begins_s + prompt_s / max(1.0, part * group.num_requests))
            places.give_back(first_s + group.output_tokens / group.num_choices * token_s, count)
            taken += count
        begun += group.num_requests
        if number < len(order.groups):
            num_before.append(round(begun))
    return Forecast(
        order,
        points,
        num_places=places.num_places,
        num_before=num_before,
        token_s=token_s,
        prompt_token_s=prompt_token_s,
        iteration_s=speed.iteration_s(in_batch, 0.0),
        uncached_share=uncached_share,
    )


class _Places:
    """Where sequences can run, by the time at which they become free."""

    def __init__(self, running: Sequence[RunningGroup], capacity: Capacity) -> None:
        self._running = running
        self._capacity = capacity
        self.num_running = sum(group.num_choices for group in running)
        self.num_places = capacity.num_places * (capacity.num_ready + len(capacity.coming))
        self._free: list[tuple[float, int]] = []

    def open(self, token_s: float) -> None:
        capacity = self._capacity
        num_free = capacity.num_places * capacity.num_ready - self.num_running
        # Workers are sent a few more sequences than they run at a time: these take the first places that become free.
        num_owed = max(0, -num_free)
        for group in sorted(self._running, key=lambda group: group.tokens_left):
            count = group.num_choices - min(num_owed, group.num_choices)
            num_owed -= group.num_choices - count
            if count:
                self._free.append((group.tokens_left * token_s, count))
        if num_free > 0:
            self._free.append((0.0, num_free))
        self._free += [(at_s, capacity.num_places) for at_s in capacity.coming]
        heapq.heapify(self._free)

    def take(self, least: int, most: int) -> tuple[float, int]:
        """So many places, or all if there are fewer: when they are free, on average, and how many."""
        taken = 0
        sum_s = 0.0
        while taken < least and self._free:
            at_s, count = heapq.heappop(self._free)
            if count > most - taken:
                heapq.heappush(self._free, (at_s, count - (most - taken)))
                count = most - taken
            sum_s += at_s * count
            taken += count
        return sum_s / taken, taken

    def give_back(self, at_s: float, count: int) -> None:
        heapq.heappush(self._free, (at_s, count))

    def num_workers_at(self, at_s: float) -> int:
        return max(1, self._capacity.num_ready + sum(ready_s <= at_s for ready_s in self._capacity.coming))


def _phantoms(average: WaitingGroup, num_places: int, num_choices: int) -> list[WaitingGroup]:
    """They take each place twice, of an idle fleet too: what comes behind them finds it as busy as it can be. The first
    ones singly, so that a free place is seen as one."""
    size = max(1, -(-max(2 * num_places, (num_places + num_choices) // 4) // (NUM_PHANTOMS - 2)))
    grown = WaitingGroup(0, 0, size, size, average.prompt_tokens * size, average.output_tokens * size)
    return [average] * 2 + [grown] * (NUM_PHANTOMS - 2)
