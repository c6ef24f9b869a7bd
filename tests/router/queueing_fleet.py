"""A fleet that serves first come, first served in virtual time, beside routers that predict its waits."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, cast

from headrace_router.arrivals import Arrivals
from headrace_router.choices import ChoiceText
from headrace_router.forecast import Capacity
from headrace_router.model_queue import ModelQueue
from headrace_router.prompt import Prompt
from headrace_router.queue_watch import LOAD_GROUPS, PERIOD_S
from headrace_scheduler.ledger import most_admitted
from headrace_shared.engine_speed import EngineSpeed
from headrace_shared.fleet_messages import RouterLoad
from headrace_shared.messages import FinishReason, Request, RequestId, RouterId, SamplingParams, StopParams

SPEED = EngineSpeed(per_iteration=0.1, per_output=0.002, per_prompt=0.0002)
NUM_WORKERS, NUM_PLACES = 2, 8
DEPTH_PERIOD_S = 1.0
ENQUEUE_S = 0.003
TOLD_S = 0.002
"""A load on its way."""
ACK_S = 0.02
HEARD_S = 0.003
"""Until the scheduler knows that a sequence has ended, and its successor is at the worker."""
FIRST_REPORT_S = 0.5
REPORT_S = 1.0
PROMPT_TOKENS = 64


class Told(NamedTuple):
    at: float
    first_token_s: float
    """From then on."""


class _Choice:
    """As much of a `ChoiceText` as is looked at."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None


class Router:
    def __init__(self, name: str) -> None:
        self.arrivals = Arrivals()
        self.queue = ModelQueue(RouterId(name), "m", self.arrivals)


class Job:
    def __init__(self, router: Router, number: int, arrives_at: float, num_tokens: int) -> None:
        request = Request(
            request_id=RequestId(f"{number:032x}"),
            router=RouterId("router"),
            model="m",
            prompt=bytes(4 * PROMPT_TOKENS),
            sampling=SamplingParams(seed=0),
            stop=StopParams(max_tokens=num_tokens),
        )
        self.router = router
        self.choice = _Choice()
        self.prompt = Prompt(request, [cast(ChoiceText, self.choice)])
        self.arrives_at = arrives_at
        self.num_tokens = num_tokens
        self.told: list[Told] = []
        """While it waited."""
        self.began_at = 0.0


class QueueingFleet:
    def __init__(self, num_routers: int, num_places: int = NUM_PLACES) -> None:
        """`num_places` of each worker."""
        self.now = 0.0
        self.routers = [Router(f"router-{number}") for number in range(num_routers)]
        self.jobs: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._sequences = itertools.count(1)
        self._waiting: deque[Job] = deque()
        self._num_stored = 0
        self._sent: list[list[Job]] = [[] for _ in range(NUM_WORKERS)]
        """To each worker, oldest first: some more than it runs at a time."""
        self._is_busy = [False] * NUM_WORKERS
        self._num_places = num_places
        self._capacity = Capacity(NUM_WORKERS, num_places, 2048, SPEED)
        self._num_left = 0

    def run(self, arrivals: Iterable[float], draw: random.Random) -> None:
        """Until all who arrive at these times have been served."""
        for number, at in enumerate(sorted(arrivals)):
            job = Job(draw.choice(self.routers), number, at, draw.randint(24, 72))
            self.jobs.append(job)
            self.at(at + ENQUEUE_S * draw.uniform(0.5, 1.5), partial(self.store, job))
        self._num_left = len(self.jobs)
        self.begin(draw)
        while self._num_left:
            self._next()

    def begin(self, draw: random.Random) -> None:
        """What routers do all the time."""
        for router in self.routers:
            self.at(draw.uniform(0.0, PERIOD_S), partial(self.refresh, router))
            self.at(draw.uniform(0.0, DEPTH_PERIOD_S), partial(self._count, router))

    def run_until(self, until: float) -> None:
        while self.now < until:
            self._next()

    def _next(self) -> None:
        self.now, _, what = heapq.heappop(self._events)
        what()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def store(self, job: Job) -> None:
        job.prompt.stream_sequence = next(self._sequences)
        self._num_stored += 1
        self._waiting.append(job)
        job.router.queue.queued(job.prompt, self.now, lambda error: None)
        self.at(job.arrives_at + FIRST_REPORT_S, partial(self._report, job))
        self._place()

    def _report(self, job: Job) -> None:
        if job.choice.num_tokens:
            return
        prompt = job.prompt
        place = job.router.queue.place(prompt.request, prompt.stream_sequence or 0, prompt.num_tokens, self.now)
        if place.first_token_s is not None:
            job.told.append(Told(self.now, place.first_token_s))
        self.at(self.now + REPORT_S, partial(self._report, job))

    def refresh(self, router: Router) -> None:
        router.queue.refresh(lambda mix: self._capacity, self.now)
        load = router.queue.load(LOAD_GROUPS, b"")
        for other in self.routers:
            if other is not router:
                self.at(self.now + TOLD_S, partial(self._hear, other, load))
        self.at(self.now + PERIOD_S, partial(self.refresh, router))

    def _hear(self, router: Router, load: RouterLoad) -> None:
        router.arrivals.hear(load.newest_sequence)
        router.queue.on_load(load, self.now)

    def _count(self, router: Router) -> None:
        router.queue.on_depth(self._num_stored)
        self.at(self.now + DEPTH_PERIOD_S, partial(self._count, router))

    def _place(self) -> None:
        """As the scheduler does: where the fewest are."""
        most = most_admitted(self._num_places)
        while self._waiting and len(emptiest := min(self._sent, key=len)) < most:
            emptiest.append(self._waiting.popleft())
        for number in range(NUM_WORKERS):
            self._step(number)

    def _step(self, number: int) -> None:
        batch = self._sent[number][: self._num_places]
        if self._is_busy[number] or not batch:
            return
        self._is_busy[number] = True
        decoding = sum(job.choice.num_tokens > 0 for job in batch)
        duration_s = SPEED.iteration_s(decoding, PROMPT_TOKENS * (len(batch) - decoding))
        self.at(self.now + duration_s, partial(self._done, number, batch))

    def _done(self, number: int, batch: list[Job]) -> None:
        self._is_busy[number] = False
        for job in batch:
            if not job.choice.num_tokens:
                job.began_at = self.now
                job.prompt.has_started = True
                job.router.queue.started(job.prompt.request.request_id, self.now)
            job.choice.num_tokens += 1
            if job.choice.num_tokens == job.num_tokens:
                job.choice.finish = FinishReason.LENGTH
                self._sent[number].remove(job)
                job.router.queue.own.remove(job.prompt.request.request_id)
                self._num_left -= 1
                self.at(self.now + ACK_S, self._acknowledge)
        self._step(number)
        self.at(self.now + HEARD_S, self._place)

    def _acknowledge(self) -> None:
        self._num_stored -= 1
