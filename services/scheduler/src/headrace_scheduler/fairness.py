"""Who goes first: classes, and within a class the tenant that was served least for its weight.

Fair sharing by a virtual token counter ("Fairness in Serving Large Language Models", Sheng et al., OSDI 2024): a
tenant's counter rises with the tokens it is served, divided by its weight, and the tenant with the lowest one is next.
Whoever comes back after it had nothing waiting is lifted to those who wait, less a bounded credit: idling earns no
more.

Counters order who waits. Who runs is taken off its place only for a higher class, or for a tenant that has less than
its fair share of the places, by one that has more.
"""

from collections import OrderedDict

from headrace_shared.messages import Lane, Request

BATCH_LEVEL = -2
LOWEST_LEVEL = -1
TOP_LEVEL = 1
INPUT_COST = 1.0
OUTPUT_COST = 2.0
"""Of a token; those of a cached prefix cost nothing. The paper's ratio, about that of what the hardware pays."""
MAX_CREDIT = 2048.0
"""Weighted tokens by which a tenant that had nothing waiting may be ahead of those who had."""
MAX_REMEMBERED = 4096
"""Tenants with nothing open whose counters are kept."""


def level_of(request: Request) -> int:
    if request.lane is Lane.BATCH:
        return BATCH_LEVEL
    return max(LOWEST_LEVEL, min(TOP_LEVEL, request.priority))


class TenantShare:
    """What one tenant has had, and has now, of one scheduler's workers."""

    __slots__ = ("all", "counter", "num_open", "num_running", "num_waiting", "tenant", "weight")

    def __init__(self, everybody: "Shares", tenant: str) -> None:
        self.all = everybody
        self.tenant = tenant
        self.weight = 1.0
        self.counter = 0.0
        self.num_open = 0
        """Sequences: those that have not ended, those that run, and those that wait for a worker."""
        self.num_running = 0
        self.num_waiting = 0

    def charge_input(self, num_tokens: int) -> None:
        self.counter += num_tokens * INPUT_COST / self.weight

    def charge_output(self, num_tokens: int) -> None:
        self.counter += num_tokens * OUTPUT_COST / self.weight

    @property
    def is_below(self) -> bool:
        """One more place would still not exceed its fair share."""
        return self.all.num_active > 1 and self.num_running + 1 <= self.fair_places

    @property
    def is_above(self) -> bool:
        """One place less would still be its fair share."""
        return self.all.num_active > 1 and self.num_running - 1 >= self.fair_places

    @property
    def fair_places(self) -> float:
        """Of the places that are taken now."""
        return self.all.num_running * self.weight / self.all.total_weight


class Shares:
    __slots__ = ("_active", "_idle", "_last_counter", "_num_running_at")

    def __init__(self) -> None:
        self._active: dict[str, TenantShare] = {}
        """Those with something open."""
        self._idle: OrderedDict[str, TenantShare] = OrderedDict()
        """Longest idle first."""
        self._last_counter = 0.0
        """Of whoever was the last to have nothing waiting any more."""
        self._num_running_at: dict[int, int] = {}
        """By class."""

    @property
    def num_active(self) -> int:
        return len(self._active)

    def of(self, tenant: str) -> TenantShare | None:
        return self._active.get(tenant)

    @property
    def num_running(self) -> int:
        return sum(self._num_running_at.values())

    @property
    def total_weight(self) -> float:
        """Of those with something open."""
        return sum(share.weight for share in self._active.values())

    def has_running_below(self, level: int) -> bool:
        return any(number and other < level for other, number in self._num_running_at.items())

    def open(self, request: Request) -> TenantShare:
        """A new request's share. Its choices count from now on, until `close` has been called for each."""
        tenant = request.tenant
        share = self._active.get(tenant)
        if share is None:
            idle = self._idle
            share = self._active[tenant] = idle.pop(tenant) if tenant in idle else TenantShare(self, tenant)
        share.weight = min(1000.0, max(0.001, request.weight))
        share.num_open += request.num_choices
        return share

    def close(self, share: TenantShare) -> None:
        share.num_open -= 1
        if share.num_open == 0:
            self._idle[share.tenant] = self._active.pop(share.tenant)
            if len(self._idle) > MAX_REMEMBERED:
                self._idle.popitem(last=False)

    def wait(self, share: TenantShare) -> None:
        if share.num_waiting == 0:
            counters = [other.counter for other in self._active.values() if other.num_waiting]
            reference = min(counters, default=self._last_counter)
            share.counter = max(share.counter, reference - MAX_CREDIT)
        share.num_waiting += 1

    def wait_no_more(self, share: TenantShare) -> None:
        share.num_waiting -= 1
        if share.num_waiting == 0:
            self._last_counter = share.counter

    def run(self, share: TenantShare, level: int) -> None:
        share.num_running += 1
        self._num_running_at[level] = self._num_running_at.get(level, 0) + 1

    def run_no_more(self, share: TenantShare, level: int) -> None:
        share.num_running -= 1
        self._num_running_at[level] -= 1

    def check_integrity(self) -> None:
        """Raises AssertionError where the counts disagree."""
        assert all(share.num_open > 0 for share in self._active.values()), self._active
        assert all(not share.num_open for share in self._idle.values()), self._idle
        running = sum(share.num_running for share in self._active.values())
        assert running == self.num_running, (running, self._num_running_at)
        assert len(self._idle) <= MAX_REMEMBERED, len(self._idle)
