"""One model under the leader's hand: what is seen of it, what was decided, what is to be done. Lost with the lease."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from headrace_autoscaler.actions import Action
from headrace_autoscaler.driver import Instance
from headrace_autoscaler.fleet import Fleet
from headrace_autoscaler.gathering import Gathering
from headrace_autoscaler.matching import Target
from headrace_autoscaler.performing import new_worker_id
from headrace_autoscaler.policy import Decision, Limits, State, decide
from headrace_autoscaler.reconcile import Counts, Reconciler
from headrace_autoscaler.repair import Bounds
from headrace_autoscaler.sharing import Share
from headrace_autoscaler.standing import Standing, standings

WAKE_PERIOD_S = 1.0
"""Between two decisions while a model has no worker that could take a request."""

log = structlog.get_logger(__name__)


class Plans(NamedTuple):
    """What the autoscaler is told to do, and how."""

    limits: Limits
    period_s: float
    models: tuple[str, ...] = ()
    """Known before any worker has spoken."""
    bounds: Bounds = Bounds()
    default_warm_up_s: float = 30.0
    """Until a start was measured."""
    settle_s: float = 2.5
    """So long is listened before anything is decided. Workers speak once a second."""


class Control:
    def __init__(
        self, model: str, plans: Plans, fleet: Fleet, gathering: Gathering, clock: Callable[[], float]
    ) -> None:
        self.model = model
        self._plans = plans
        self._fleet = fleet
        self._gathering = gathering
        self._clock = clock
        self._state = State()
        self.reconciler = Reconciler(new_worker_id, plans.bounds)
        self.decision: Decision | None = None
        self.counts = Counts()
        self._has_waiting = True

    @property
    def warm_up_s(self) -> float:
        return self.reconciler.warm_up_s or self._plans.default_warm_up_s

    @property
    def start_s(self) -> float:
        """From a request to a ready worker, where there is none."""
        return min(self._plans.period_s, WAKE_PERIOD_S) + (self.promotion_s if self.counts.parked else self.warm_up_s)

    @property
    def promotion_s(self) -> float:
        return self._fleet.promotion_s(self.model)

    async def decide(self, instances: Sequence[Instance], shown_at: float) -> None:
        """`instances`: all of the deployment's, as its engine showed them then."""
        self.counts = self.reconciler.look(self._standings(instances), self._clock(), shown_at=shown_at)
        observation = await self._gathering.observe(self.model, self.counts, self.warm_up_s)
        before = self.decision
        decision, self._state = decide(observation, self._limits(instances), self._state, self._clock())
        self.decision = decision
        self._has_waiting = observation.num_waiting is None or observation.num_waiting > 0
        if before is None or (before.desired, before.parked) != (decision.desired, decision.parked):
            wanted = {"desired": decision.desired, "parked": decision.parked}
            log.info("decision", model=self.model, workers=observation.num_workers, **wanted, reason=decision.reason)

    def _limits(self, instances: Sequence[Instance]) -> Limits:
        """A model that nobody configured, and of which nothing is left, is worth a worker only if it is asked for."""
        is_known = self.model in self._plans.models or any(each.model == self.model for each in instances)
        if is_known or self._fleet.heard(self.model, self._clock()):
            return self._plans.limits
        return self._plans.limits._replace(min_workers=0)

    @property
    def share(self) -> Share:
        desired = self.decision.desired if self.decision is not None else 0
        counts, is_full = self.counts, self.reconciler.failures.is_full
        return Share(desired, counts.ready, counts.coming, counts.leaving, is_full)

    def plan(
        self, instances: Sequence[Instance], shown_at: float, heard_for_s: float, cap: int | None = None
    ) -> list[Action]:
        """What follows from the last decision, with at most `cap` workers. `heard_for_s`: see Reconciler."""
        if self.decision is None:
            return []
        decision = self.decision
        desired, parked = decision.desired, decision.parked
        if cap is not None and cap < desired:
            log.info("another model has none: no more for this one", model=self.model, desired=desired, cap=cap)
            desired, parked = cap, 0
        target = Target(desired, parked, not decision.is_frozen, self._has_waiting)
        now, found = self._clock(), self._standings(instances)
        plan = self.reconciler.plan(target, found, now, shown_at=shown_at, heard_for_s=heard_for_s)
        self.counts = plan.counts
        return plan.actions

    def _standings(self, instances: Sequence[Instance]) -> list[Standing]:
        own = [instance for instance in instances if instance.model == self.model]
        return standings(own, self._fleet.heard(self.model, self._clock()))
