"""Scheduler, workers and client in one process on an in-process broker that can lose messages."""

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator

from headrace_scheduler.service import SchedulerService
from headrace_scheduler.settings import SchedulerSettings
from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import (
    Cancel,
    Grant,
    Lane,
    LogMessage,
    Request,
    RequestEnded,
    RequestId,
    RouterId,
    SamplingParams,
    StopParams,
    TokenLogprobs,
    WorkerId,
)
from headrace_shared.service import Service
from headrace_shared.subjects import (
    CANCELS,
    TOKENS,
    all_tokens_of,
    cancel_subject,
    grants_subject,
    hello_subject,
    requests_stream,
)
from headrace_worker.engine_frames import Iteration, Reset, Rest
from headrace_worker.loop import IterationLoop
from headrace_worker.mirror import Mirror
from headrace_worker.session import Session
from tests.patience import PATIENCE_S
from tests.queues import request_subject
from tests.scripted_engine import ScriptedEngine

MODEL = "scripted"
HELLO_S = 0.2


class LossyBroker(MemoryBroker):
    """Loses some of what is sent at most once; streams and queues lose nothing."""

    def __init__(self, loss: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._loss = loss
        self._chance = random.Random(seed)
        self.num_lost = 0

    def deliver(self, message: Message) -> None:
        kind = message.subject.partition(".")[0]
        if kind in ("grants", "progress", "workers") and self._chance.random() < self._loss:
            self.num_lost += 1
            return
        super().deliver(message)


class InProcessWorker:
    """Session, mirror, loop and scripted engine, joined by bytes as in the real worker."""

    def __init__(self, broker: MemoryBroker, name: str, engine: ScriptedEngine, step_s: float = 0.001) -> None:
        self.id = WorkerId(name)
        self.bus = MemoryBus(broker)
        self.engine = engine
        self.loop = IterationLoop(engine)
        self.state = WorkerState.READY
        self._step_s = step_s
        self._inbox: list[bytes] = []
        self._generation = 0
        self.session = Session(
            self.id, self.bus, Mirror(engine.facts.block_size), self._inbox.append, self._hello, time.monotonic()
        )

    async def run(self) -> None:
        await self.bus.subscribe(
            grants_subject(self.id), lambda message: self.session.on_control(message, time.monotonic())
        )
        self.bus.on_reconnect(lambda: self.session.on_reconnect(time.monotonic()))
        hello_at = 0.0
        while True:
            now = time.monotonic()
            if now - hello_at > HELLO_S:
                hello_at = now
                self._hello()
            self._take()
            step = self.loop.step()
            if step is not None:
                rows = tuple(step.sequences)
                frame = Iteration(
                    generation=self._generation,
                    num_iterations=step.num_iterations,
                    rows=rows,
                    released=tuple(step.released),
                )
                self.session.on_iteration(codec.decode(codec.encode(frame), Iteration), now)
            self.session.tick(now)
            await asyncio.sleep(self._step_s)

    def _take(self) -> None:
        inbox, self._inbox[:] = list(self._inbox), []
        for data in inbox:
            frame: Grant | Reset | Rest = codec.decode(data, Grant | Reset | Rest)
            if not isinstance(frame, Grant):
                self.loop.reset()
                self._generation = frame.generation
                continue
            for admission in frame.admissions:
                self.loop.admit(admission)
            for extension in frame.extensions:
                self.loop.extend(extension)
            for sequence_id in frame.releases:
                self.loop.release(sequence_id)

    def _hello(self) -> None:
        facts = self.engine.facts
        hello = Hello(
            worker=self.id,
            model=MODEL,
            state=self.state,
            epoch=self.session.epoch,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            context=facts.context,
            max_sequences=facts.max_sequences,
            tokens_per_iteration=facts.tokens_per_iteration,
        )
        if self.bus.is_connected:
            self.bus.publish(hello_subject(MODEL, self.id), codec.encode(hello))


class World:
    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.bus = MemoryBus(broker)
        self.router = RouterId("router-1")
        self.outputs: dict[RequestId, dict[int, list[int]]] = {}
        self.scores: dict[RequestId, list[TokenLogprobs]] = {}
        """Log-probabilities of the prompt's tokens but the first."""
        self._num_scores: dict[RequestId, int] = {}
        self.endings: dict[RequestId, list[RequestEnded]] = {}
        self._tasks: dict[str, asyncio.Task[object]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, loss: float = 0.0, seed: int = 0) -> "AsyncIterator[World]":
        world = cls(LossyBroker(loss, seed))
        for spec in (requests_stream(10_000, 1 << 30), TOKENS, CANCELS):
            await world.bus.ensure_stream(spec)
        await world.bus.subscribe(all_tokens_of(world.router), world._on_log)
        try:
            yield world
        finally:
            for name in list(world._tasks):
                await world.kill(name)

    def scheduler(self, name: str = "scheduler-1", **settings: object) -> SchedulerService:
        service = Service("scheduler", name)
        values = SchedulerSettings(model=MODEL, **settings)  # type: ignore[arg-type]  # what the fields take
        scheduler = SchedulerService(service, MemoryBus(self.broker), values)
        self._tasks[name] = asyncio.create_task(service.run(lambda _: scheduler.run(), 10.0))
        return scheduler

    def worker(self, name: str = "worker-1", *, step_s: float = 0.001, **engine: int) -> InProcessWorker:
        worker = InProcessWorker(self.broker, name, ScriptedEngine(**engine), step_s)  # type: ignore[arg-type]  # ints
        self._tasks[name] = asyncio.create_task(worker.run())
        return worker

    def is_over(self, name: str) -> bool:
        return self._tasks[name].done()

    async def kill(self, name: str) -> None:
        """Stops a scheduler or worker without a word."""
        task = self._tasks.pop(name)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 16,
        seed: int = 0,
        num_choices: int = 1,
        model: str = MODEL,
        num_prompt_logprobs: int | None = None,
    ) -> RequestId:
        request = Request(
            request_id=RequestId(secrets.token_hex(16)),
            router=self.router,
            model=model,
            prompt=codec.pack_ids(prompt),
            sampling=SamplingParams(seed=seed, num_prompt_logprobs=num_prompt_logprobs),
            stop=StopParams(max_tokens=max_tokens),
            num_choices=num_choices,
        )
        self.outputs[request.request_id] = {choice: [] for choice in range(num_choices)}
        self.endings[request.request_id] = []
        self.scores[request.request_id] = []
        self._num_scores[request.request_id] = 0 if num_prompt_logprobs is None else len(prompt) - 1
        await self.enqueue(codec.encode(request), request.request_id)
        return request.request_id

    async def enqueue(self, data: bytes, message_id: str) -> None:
        await self.bus.enqueue(request_subject(MODEL, Lane.INTERACTIVE, 0), data, message_id=message_id)

    def cancel(self, request_id: RequestId) -> None:
        self.bus.publish(cancel_subject(request_id), codec.encode(Cancel(request_id=request_id)))

    async def ended(self, *request_ids: RequestId, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(self.endings[request_id] for request_id in request_ids):
            for name, task in self._tasks.items():
                assert not task.done(), (name, task)
            assert time.monotonic() < deadline, [key for key in request_ids if not self.endings[key]]
            await asyncio.sleep(0.005)

    async def until_settled(self, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while await self.bus.num_messages("REQUESTS"):
            assert time.monotonic() < deadline, "messages left in the queue"
            await asyncio.sleep(0.01)

    def _on_log(self, message: Message) -> None:
        event: LogMessage = codec.decode(message.data, LogMessage)
        if event.request_id not in self.endings:
            return
        if isinstance(event, RequestEnded):
            self.endings[event.request_id].append(event)
            return
        scores = self.scores[event.request_id]
        if event.index < 0:
            assert event.choice == 0
            start = self._num_scores[event.request_id] + event.index
            assert 0 <= start <= len(scores), f"{event} after {len(scores)} tokens of the prompt"
            overlap = len(scores) - start
            assert list(event.logprobs[:overlap]) == scores[start : start + len(event.logprobs)]
            scores.extend(event.logprobs[overlap:])
            return
        assert event.choice or len(scores) == self._num_scores[event.request_id], "the prompt is told first"
        output = self.outputs[event.request_id][event.choice]
        assert event.index <= len(output), f"{event} after {len(output)} tokens"
        overlap = len(output) - event.index
        assert list(event.tokens[:overlap]) == output[event.index : event.index + len(event.tokens)]
        output.extend(event.tokens[overlap:])
