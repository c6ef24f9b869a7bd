"""The same fleet with far more clients than it can serve: the door, and who obeys what he is told there."""

import math
import random
from functools import partial

from headrace_router.gate import JITTER, MIN_RETRY_S
from headrace_router.promises import Promises
from headrace_router.queue_limits import Depth, Obstacle, QueueLimits, judge
from tests.router.queueing_fleet import ENQUEUE_S, PROMPT_TOKENS, TOLD_S, Job, QueueingFleet, Router

LIMITS = QueueLimits(10_000, 20_000_000, 300.0)


class Door:
    """Of one router."""

    def __init__(self) -> None:
        self.promises = Promises()
        self.booked: list[tuple[bytes, float]] = []
        """Not told to the others yet; the next ones likewise."""
        self.kept: list[bytes] = []


class CrowdedFleet(QueueingFleet):
    def __init__(self, num_routers: int, deadline_s: float, draw: random.Random) -> None:
        super().__init__(num_routers)
        self.num_returned = 0
        self.num_let_in_again = 0
        self._doors = {router: Door() for router in self.routers}
        self._deadline_s = deadline_s
        self._draw = draw

    def crowd(self, rate: float, obedient_rate: float, seconds: float) -> None:
        """So many come a second, of whom the obedient come back once, if that is within the time."""
        draw, at = self._draw, 0.0
        while (at := at + draw.expovariate(rate + obedient_rate)) < seconds:
            obeys = draw.random() < obedient_rate / (rate + obedient_rate)
            digest = draw.getrandbits(64).to_bytes(8, "little")
            self.at(at, partial(self._knock, draw.randint(24, 72), digest, seconds if obeys else 0.0))
        self.begin(draw)
        self.run_until(seconds)

    def _knock(self, num_tokens: int, digest: bytes, returns_until: float, *, is_back: bool = False) -> None:
        router = self._draw.choice(self.routers)
        queue, promises, now = router.queue, self._doors[router].promises, self.now
        answer_tokens = queue.own.lengths.expect(num_tokens).mean
        is_due = promises.is_due(digest, now)
        refusal = judge(
            queue.estimate(PROMPT_TOKENS, 1, num_tokens, 0, "", 1.0, now),
            queue.depth,
            Depth(1, PROMPT_TOKENS + answer_tokens),
            LIMITS,
            left_s=self._deadline_s,
            margin=queue.calibration.margin,
            spacing_s=queue.spacing_s,
            is_returning=is_due,
            others_bear_s=queue.others_bear_s,
        )
        self.num_returned += is_back
        if is_due and promises.keep(digest, now):
            self._doors[router].kept.append(digest)
        if refusal is None:
            self.num_let_in_again += is_back
            job = Job(router, len(self.jobs), now, num_tokens)
            self.jobs.append(job)
            self.at(now + ENQUEUE_S, partial(self.store, job))
            return
        if refusal.obstacle is Obstacle.DEADLINE:
            queue.refused(refusal.borne_s, now)
        wait_s = promises.book("m", digest, max(MIN_RETRY_S, refusal.free_in_s), queue.spacing_s, now)
        self._doors[router].booked.append((digest, wait_s))
        back_at = now + math.ceil(wait_s * self._draw.uniform(1.0, 1.0 + JITTER))
        if back_at < returns_until:
            self.at(back_at, partial(self._knock, num_tokens, digest, 0.0, is_back=True))

    def refresh(self, router: Router) -> None:
        super().refresh(router)
        door = self._doors[router]
        door.promises.settle(self.now)
        booked, door.booked = door.booked, []
        kept, door.kept = door.kept, []
        for other in self.routers:
            if other is not router:
                self.at(self.now + TOLD_S, partial(self._hear_of, other, booked, kept))

    def _hear_of(self, router: Router, booked: list[tuple[bytes, float]], kept: list[bytes]) -> None:
        promises = self._doors[router].promises
        for digest in kept:
            promises.keep(digest, self.now)
        for digest, due_in_s in booked:
            promises.add("m", digest, self.now + due_in_s, self.now)
