"""Schedulers and workers in virtual time: the real cores, the real iteration loop and the real rules of who takes what
from which queue, driven by a clock that jumps from event to event. The engine is a formula, and the broker a delay.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from headrace_router.partitioning import partition_of
from headrace_scheduler.decisions import Credit, WorkerFacts
from headrace_scheduler.queue_owners import owners, to_steal
from headrace_scheduler.scheduler import Scheduler
from headrace_scheduler.sequence import SequenceState
from headrace_scheduler.stealing import STEAL_S
from headrace_shared.codec import pack_ids
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import (
    Lane,
    Progress,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    SequenceProgress,
    StopParams,
    WorkerId,
)
from headrace_shared.subjects import Queue, num_partitions
from headrace_worker.iteration import EngineFacts, SampledToken, SequenceSlice
from headrace_worker.loop import IterationLoop

CARD = ModelCard(model="m", tokenizer=b"", vocab_size=1 << 30, context=0, eos_token_ids=())


class Costs(NamedTuple):
    """Seconds. The defaults are about those of a model of 8 billion weights on one large GPU."""

    iteration_s: float = 7e-3
    decode_s: float = 2e-5
    """Each sequence that decodes."""
    prompt_token_s: float = 3e-5
    broker_s: float = 5e-4
    """One way."""


class Figures(NamedTuple):
    tenant: str
    sent_at: float
    token_times: list[float]
    num_wanted: int

    @property
    def first_token_s(self) -> float | None:
        return self.token_times[0] - self.sent_at if self.token_times else None


class _Engine:
    """Takes as long as the formula says, and samples the same token for ever."""

    looks_ahead = False
    adapters = None

    def __init__(self, facts: WorkerFacts, costs: Costs) -> None:
        self._costs = costs
        self.duration_s = 0.0
        self._submitted: Sequence[SequenceSlice] = ()
        self.facts = EngineFacts(
            card=CARD,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            context=facts.context,
            max_sequences=facts.max_sequences,
            tokens_per_iteration=facts.tokens_per_iteration,
            device="virtual",
            dtype="none",
        )

    def add(self, admission: object) -> None: ...

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        return True

    def remove(self, sequence_id: SequenceId) -> None: ...

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        num_prompt = sum(part.num_tokens for part in slices if part.num_tokens > 1)
        num_decoding = sum(part.num_tokens == 1 for part in slices)
        costs = self._costs
        self.duration_s = costs.iteration_s + costs.decode_s * num_decoding + costs.prompt_token_s * num_prompt
        self._submitted = slices

    def rest(self) -> None: ...

    def collect(self) -> list[SampledToken]:
        return [SampledToken(part.sequence_id, 1) for part in self._submitted if part.samples]


class _Worker:
    def __init__(self, fleet: "VirtualFleet", node: "_Node", worker_id: WorkerId, facts: WorkerFacts) -> None:
        self._fleet = fleet
        self._node = node
        self.worker_id = worker_id
        self._engine = _Engine(facts, fleet.costs)
        self._loop = IterationLoop(self._engine, clock=lambda: fleet.now, decode_slowdown=fleet.decode_slowdown)
        self._requests: dict[SequenceId, RequestId] = {}
        self._is_running = False
        self._numbers = itertools.count(1)

    def apply(self, credit: Credit) -> None:
        for admission in credit.admissions:
            self._requests[admission.sequence_id] = admission.request.request_id
            self._loop.admit(admission)
        for extension in credit.extensions:
            self._loop.extend(extension)
        for sequence_id in credit.releases:
            self._loop.release(sequence_id)
        if not self._is_running:
            self._is_running = True
            self._step()

    def _step(self) -> None:
        fleet = self._fleet
        result = self._loop.step()
        if result is None:
            self._is_running = False
            return
        duration_s = self._engine.duration_s if result.sequences else 0.0
        rows = [
            SequenceProgress(row.sequence_id, row.num_computed, () if row.token is None else (row.token,), row.finish)
            for row in result.sequences
        ]
        progress = Progress(
            worker=self.worker_id,
            epoch=1,
            number=next(self._numbers),
            grant_seen=0,
            sequences=tuple(rows),
            released=tuple(result.released),
        )

        def done() -> None:
            for row in rows:
                if row.tokens:
                    fleet.figures[self._requests[row.sequence_id]].token_times.append(fleet.now)
            fleet.at(fleet.now + fleet.costs.broker_s, lambda: self._node.report(self.worker_id, progress))
            self._step()

        fleet.at(fleet.now + duration_s, done)


class _Node:
    """One scheduler with its workers."""

    def __init__(self, fleet: "VirtualFleet", name: str, facts: Sequence[tuple[WorkerId, WorkerFacts]]) -> None:
        self._fleet = fleet
        self.name = name
        self.core = Scheduler()
        self._workers = {worker_id: _Worker(fleet, self, worker_id, own) for worker_id, own in facts}
        for worker_id, own in facts:
            self.core.add_worker(worker_id, own, (), 0.0)
        self._has_pass = False
        self.last: dict[Queue, RequestId] = {}

    def report(self, worker_id: WorkerId, progress: Progress) -> None:
        self.core.apply_progress(worker_id, progress, self._fleet.now)
        self.wake()

    def take(self, request: Request, stream_sequence: int) -> None:
        self.core.add_request(request, "ack", stream_sequence, 1, self._fleet.now)
        self.wake()

    def waits(self, request_id: RequestId | None) -> bool:
        request = None if request_id is None else self.core.request(request_id)
        return request is not None and not request.in_state(SequenceState.RUNNING)

    def wake(self) -> None:
        if not self._has_pass:
            self._has_pass = True
            self._fleet.at(self._fleet.now + self._fleet.costs.broker_s, self._pass)

    def _pass(self) -> None:
        self._has_pass = False
        fleet = self._fleet
        for worker_id, credit in self.core.schedule(fleet.now).credits.items():
            fleet.at(fleet.now + fleet.costs.broker_s, partial(self._workers[worker_id].apply, credit))
        fleet.pump(self)


class VirtualFleet:
    def __init__(
        self,
        num_schedulers: int,
        num_workers: int,
        facts: WorkerFacts,
        *,
        costs: Costs | None = None,
        decode_slowdown: float = 1.5,
        has_affinity: bool = True,
        has_flows: bool = True,
    ) -> None:
        """Without `has_affinity` every scheduler takes from every queue, without `has_flows` all tenants share them."""
        self.now = 0.0
        self.costs = costs or Costs()
        self.decode_slowdown = decode_slowdown
        self.figures: dict[RequestId, Figures] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._has_affinity = has_affinity
        self._has_flows = has_flows
        self._queues: dict[Queue, deque[tuple[Request, int]]] = {}
        self._flows: dict[str, int] = {}
        each = [
            [(WorkerId(f"worker-{n}"), facts) for n in range(i, num_workers, num_schedulers)]
            for i in range(num_schedulers)
        ]
        self.nodes = [_Node(self, f"scheduler-{number}", own) for number, own in enumerate(each)]
        self._turn = itertools.cycle(self.nodes)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def send(self, when: float, tenant: str, prompt: Sequence[int], num_tokens: int, priority: int = 0) -> None:
        number = len(self.figures)
        request = Request(
            request_id=RequestId(f"{number:032x}"),
            router=RouterId("router"),
            model="m",
            prompt=pack_ids(prompt),
            sampling=SamplingParams(seed=0),
            stop=StopParams(max_tokens=num_tokens),
            tenant=tenant,
            priority=priority,
        )
        flow = self._flows.setdefault(tenant, len(self._flows)) if self._has_flows else 0
        partition = partition_of(request.prompt, num_partitions(Lane.INTERACTIVE, flow))
        queue = Queue("m", Lane.INTERACTIVE, flow, partition)
        self._queues.setdefault(queue, deque())
        self.figures[request.request_id] = Figures(tenant, when, [], num_tokens)

        def arrive() -> None:
            self._queues[queue].append((request, number + 1))
            # Without affinity whoever asked first gets it.
            for node in self.nodes if self._has_affinity else [next(self._turn) for _ in self.nodes]:
                self.pump(node)

        self.at(when, arrive)

    def run(self, until: float) -> None:
        if len(self.nodes) > 1 and self._has_affinity:
            for node in self.nodes:
                self.at(self.now + STEAL_S, partial(self._steal, node, until))
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def pump(self, node: _Node) -> None:
        """Takes from the node's queues as `Intake` does: while there is room, or the first of a queue."""
        own = [queue for queue in self._queues if self._is_owned(queue, node)]
        has_taken = True
        while has_taken:
            has_taken = False
            for queue in own:
                if self._queues[queue] and (node.core.room() > 0 or not node.waits(node.last.get(queue))):
                    self._take(node, queue)
                    has_taken = True

    def hit_rate(self) -> float:
        gauges = [node.core.gauges() for node in self.nodes]
        return sum(each.num_cached_tokens for each in gauges) / max(1, sum(each.num_known_tokens for each in gauges))

    def _steal(self, node: _Node, until: float) -> None:
        others = [queue for queue in self._queues if not self._is_owned(queue, node)]
        if not node.core.num_waiting:
            found = to_steal([len(self._queues[queue]) for queue in others], node.core.room())
            if found is not None:
                for _ in range(found[1]):
                    self._take(node, others[found[0]])
        if self.now < until:
            self.at(self.now + STEAL_S, lambda: self._steal(node, until))

    def _take(self, node: _Node, queue: Queue) -> None:
        request, stream_sequence = self._queues[queue].popleft()
        node.last[queue] = request.request_id
        node.take(request, stream_sequence)

    def _is_owned(self, queue: Queue, node: _Node) -> bool:
        if not self._has_affinity or len(self.nodes) == 1:
            return True
        # The batch queue of each flow is dealt out with the others.
        count = num_partitions(Lane.INTERACTIVE, queue.flow) + 1
        return owners(count, f"m/{queue.flow}", [each.name for each in self.nodes])[queue.partition] == node.name
