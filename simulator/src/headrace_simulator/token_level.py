"""A fleet of workers token by token: the scheduler's own core, and each worker's own iteration loop and mirror, in
virtual time. For a few workers and minutes.

    request -> queue -> Scheduler -> Grant -> IterationLoop + TimingEngine -> Mirror -> Progress -> Scheduler

Nothing is modelled but the way between them: each message takes MESSAGE_S. Progress is sent as the worker's session
sends it. A worker that goes is told to take nothing more, and what it still runs is placed elsewhere.
"""

import heapq
from collections import deque
from itertools import count
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from headrace_scheduler.decisions import Credit, LossCause
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.engine_speed import Work
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Grant, Progress, Request, RequestId, RouterId, SamplingParams, StopParams, WorkerId
from headrace_simulator.arrivals import Arrivals
from headrace_simulator.cluster import Load, Step
from headrace_simulator.workers import WorkerKind
from headrace_worker.iteration import EngineFacts
from headrace_worker.loop import IterationLoop, StepResult
from headrace_worker.loop_frames import apply_frame
from headrace_worker.mirror import MAX_COALESCED, Mirror
from headrace_worker.timing.engine import TimingEngine

MESSAGE_S = 0.5e-3
"""From one process through the broker to another."""
MAX_MESSAGE_BYTES = 1 << 20
VOCAB_SIZE = 50_000
IDLE = Work(0.0, 0.0, 0.0, 0.0)


class _Came(NamedTuple):
    request: Request


class _Granted(NamedTuple):
    worker: "_Worker"
    grant: Grant


class _Iterated(NamedTuple):
    worker: "_Worker"
    result: StepResult


class _Reported(NamedTuple):
    worker: "_Worker"
    progress: Progress


def _sum(spent: Work, took_s: float, result: StepResult) -> Work:
    num_outputs = sum(row.token is not None for row in result.sequences)
    return Work(
        spent.busy_s + took_s,
        spent.num_iterations + 1,
        spent.num_outputs + num_outputs,
        spent.num_prompt_tokens + result.num_prefill_tokens,
    )


_Event = _Came | _Granted | _Iterated | _Reported


class _Worker:
    def __init__(self, worker_id: WorkerId, kind: WorkerKind) -> None:
        facts = kind.facts
        card = ModelCard(model="", tokenizer=b"", vocab_size=VOCAB_SIZE, context=facts.context, eos_token_ids=())
        engine_facts = EngineFacts(card, *facts, "timing", "bfloat16")
        self.id = worker_id
        self.engine = TimingEngine(kind.roofline, engine_facts)
        self.loop = IterationLoop(self.engine, clock=lambda: self.engine.elapsed_s)
        self.mirror = Mirror(facts.block_size)
        self.inbox: list[Grant] = []
        self.is_busy = False
        self.is_gone = False
        self.num_grants = 0
        self.num_reports = 0
        self.num_coalesced = 0
        self.spent = IDLE
        """In the present step."""


class TokenLevel:
    def __init__(self, kind: WorkerKind, *, step_s: float, seed: int = 0) -> None:
        self._kind = kind
        self._step_s = step_s
        self._scheduler = Scheduler()
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[float, Request]] = deque()
        self._events: list[tuple[float, int, _Event]] = []
        self._order = count()
        self._numbers = count(1)
        self._random = np.random.default_rng((seed, 1 << 42))
        self._came_at: dict[RequestId, float] = {}
        """Of requests without a first token."""
        self._ttft_s: list[float] = []
        self._num_finished = 0

    def step(self, now: float, num_ready: int, arrivals: Arrivals) -> Step:
        self._scale(num_ready, now)
        for worker in self._workers:
            worker.spent = IDLE
        times = np.sort(self._random.random(arrivals.num)) * self._step_s
        for after_s, prompt, answer in zip(times, arrivals.prompts, arrivals.answers, strict=True):
            self._at(now + float(after_s), _Came(self._request(int(prompt), int(answer))))
        end = now + self._step_s
        while self._events and self._events[0][0] < end:
            at, _, event = heapq.heappop(self._events)
            self._handle(event, at)
        step = Step(np.asarray(self._ttft_s), self._num_finished)
        self._ttft_s = []
        self._num_finished = 0
        return step

    def load(self, now: float) -> Load:
        waiting = len(self._queue) + self._scheduler.num_waiting
        gauges = self._scheduler.gauges().workers.values()
        num_blocks = sum(each.num_blocks for each in gauges) or 1
        num_running = sum(each.num_running for each in gauges)
        num_ready = len(self._workers) or 1
        oldest_s = now - self._queue[0][0] if self._queue else 0.0
        totals = [sum(figures) / num_ready for figures in zip(*(each.spent for each in self._workers), strict=True)]
        spent = Work(*totals) if totals else IDLE
        return Load(
            num_waiting=waiting,
            num_running=num_running,
            num_waiting_tokens=sum(len(request.prompt) // 4 for _, request in self._queue),
            oldest_wait_s=max(oldest_s, self._scheduler.oldest_wait_s(now)),
            kv_use=sum(each.num_referenced for each in gauges) / num_blocks,
            batch_occupancy=min(1.0, num_running / (num_ready * self._kind.facts.max_sequences)),
            spent=spent,
            utilization=min(1.0, spent.busy_s / self._step_s),
        )

    def _scale(self, num_ready: int, now: float) -> None:
        while len(self._workers) < num_ready:
            worker = _Worker(WorkerId(f"worker-{next(self._numbers)}"), self._kind)
            self._workers.append(worker)
            self._scheduler.add_worker(worker.id, self._kind.facts, (), now)
        while len(self._workers) > num_ready:
            worker = self._workers.pop()
            worker.is_gone = True
            self._scheduler.worker_lost(worker.id, now, LossCause.HANDED_OVER)
        self._schedule(now)

    def _request(self, num_prompt: int, num_answer: int) -> Request:
        """No two prompts begin alike, so that nothing comes from the prefix cache."""
        context = self._kind.facts.context
        num_prompt = min(num_prompt, context - 1)
        number = next(self._numbers)
        prompt = self._random.integers(0, VOCAB_SIZE, num_prompt, dtype=np.uint32).astype("<u4").tobytes()
        return Request(
            request_id=RequestId(f"{number:032x}"),
            router=RouterId("router"),
            model="",
            prompt=prompt,
            sampling=SamplingParams(seed=number),
            stop=StopParams(max_tokens=min(num_answer, context - num_prompt)),
        )

    def _at(self, when: float, event: _Event) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _handle(self, event: _Event, now: float) -> None:
        match event:
            case _Came(request):
                self._came_at[request.request_id] = now
                self._queue.append((now, request))
                self._schedule(now)
            case _Granted(worker, grant):
                worker.mirror.apply_grant(grant)
                worker.inbox.append(grant)
                if not worker.is_busy and not worker.is_gone:
                    self._iterate(worker, now)
            case _Iterated(worker, result):
                self._on_iterated(worker, result, now)
            case _Reported(worker, progress):
                if not worker.is_gone:
                    self._scheduler.apply_progress(worker.id, progress, now)
                    self._schedule(now)

    def _on_iterated(self, worker: _Worker, result: StepResult, now: float) -> None:
        if worker.is_gone:
            return
        worker.mirror.apply_rows(result.sequences, result.released)
        for sequence in worker.mirror.unpublished():
            frame = sequence.next_frame()
            worker.mirror.mark_published(sequence, frame)
            came_at = self._came_at.pop(frame.request_id, None)
            if came_at is not None:
                self._ttft_s.append(now + MESSAGE_S - came_at)
        worker.num_coalesced += 1
        if worker.mirror.is_report_urgent or worker.num_coalesced >= MAX_COALESCED:
            self._report(worker, now)
        self._iterate(worker, now)

    def _iterate(self, worker: _Worker, now: float) -> None:
        for grant in worker.inbox:
            apply_frame(grant, worker.loop, 0)
        worker.inbox.clear()
        before_s = worker.engine.elapsed_s
        result = worker.loop.step()
        worker.is_busy = result is not None
        if result is not None:
            took_s = worker.engine.elapsed_s - before_s
            worker.spent = _sum(worker.spent, took_s, result)
            self._at(now + took_s, _Iterated(worker, result))
        elif worker.mirror.has_report:
            self._report(worker, now)

    def _report(self, worker: _Worker, now: float) -> None:
        worker.num_coalesced = 0
        rows, released = worker.mirror.report(MAX_MESSAGE_BYTES)
        worker.num_reports += 1
        worker.mirror.mark_reported(rows, released, worker.num_reports)
        progress = Progress(
            worker=worker.id,
            epoch=1,
            number=worker.num_reports,
            grant_seen=worker.num_grants,
            sequences=tuple(rows),
            released=tuple(released),
        )
        self._at(now + MESSAGE_S, _Reported(worker, progress))

    def _schedule(self, now: float) -> None:
        room = self._scheduler.room()
        while self._queue and room > 0:
            _, request = self._queue.popleft()
            self._scheduler.add_request(request, "", 0, 1, now)
            room -= 1
        decisions = self._scheduler.schedule(now)
        self._num_finished += len(decisions.ended)
        for request_id, _ in decisions.losses:
            self._scheduler.recorded(request_id, now)
        workers = {worker.id: worker for worker in self._workers}
        for worker_id, credit in decisions.credits.items():
            self._grant(workers[worker_id], credit, now)

    def _grant(self, worker: _Worker, credit: Credit, now: float) -> None:
        worker.num_grants += 1
        grant = Grant(
            worker=worker.id,
            epoch=1,
            number=worker.num_grants,
            progress_seen=worker.num_reports,
            admissions=tuple(replace(each, ack_subject="") for each in credit.admissions),
            extensions=tuple(credit.extensions),
            releases=tuple(credit.releases),
        )
        self._at(now + MESSAGE_S, _Granted(worker, grant))
