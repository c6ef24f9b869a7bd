"""An intake on an in-process broker, with a core that takes whatever comes."""

import asyncio
import time

from headrace_scheduler.broker_clock import BrokerClock
from headrace_scheduler.cancellations import Cancellations
from headrace_scheduler.decisions import WorkerFacts
from headrace_scheduler.endings import Endings
from headrace_scheduler.intake import Intake
from headrace_scheduler.lifetimes import Lifetimes
from headrace_scheduler.losses import Losses
from headrace_scheduler.scheduler import Scheduler
from headrace_shared import codec
from headrace_shared.bus import Delivery
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.messages import Cancel, Lane, LogMessage, Request, RequestEnded, RequestId, TokenFrame
from headrace_shared.subjects import TOKENS, queues_of, tokens_subject
from tests.scheduler.shell_builders import MODEL, prepare

FACTS = WorkerFacts(num_blocks=64, block_size=16, context=1024, max_sequences=2, tokens_per_iteration=64)


class Bench:
    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.core = Scheduler()
        self.endings = Endings(self.bus)
        self.cancels: list[Cancel] = []
        self.cancellations = Cancellations(self.bus, self.cancels.append)
        self.lifetimes = Lifetimes(
            self.bus,
            BrokerClock(self.bus, "REQUESTS", time.monotonic),
            0.5,
            cancel=lambda request_id, reason: self.core.cancel(request_id, None, reason, 0.0),
            held=self.owned,
            clock=time.monotonic,
        )
        self.may_pull = True
        self.skipped_s = 0.0
        self.num_wakes = 0
        self.intake = Intake(
            self.bus,
            MODEL,
            lambda: self.core,
            self.endings,
            self.cancellations,
            Losses(self.bus, lambda request_id: None),
            self.lifetimes,
            max_deliveries=3,
            may_pull=lambda: self.may_pull,
            wake=self._wake,
            clock=lambda: time.monotonic() + self.skipped_s,
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await prepare(self.bus)
        self.intake.serve(0)
        await self.lifetimes.open()
        await self.cancellations.open()
        for work in (self.endings.run(), self.cancellations.run()):
            self.tasks.append(asyncio.create_task(work))

    def run_intake(self) -> "asyncio.Task[None]":
        task = asyncio.create_task(self.intake.run())
        self.tasks.append(task)
        return task

    async def put(self, message: Request | bytes, lane: Lane = Lane.INTERACTIVE) -> None:
        data = message if isinstance(message, bytes) else codec.encode(message)
        await self.bus.enqueue(queues_of(MODEL, lane, 0)[-1].subject, data, message_id=data.hex())

    async def pull(self, lane: Lane = Lane.INTERACTIVE) -> Delivery:
        delivery = await self.bus.pull(queues_of(MODEL, lane, 0)[-1].consumer, 3.0)
        assert delivery is not None
        return delivery

    async def endings_of(self, wanted: Request) -> list[RequestEnded]:
        return [event for event in await self.log_of(wanted) if isinstance(event, RequestEnded)]

    async def log_of(self, wanted: Request) -> list[TokenFrame | RequestEnded]:
        messages = await self.bus.read(TOKENS.name, tokens_subject(wanted.router, wanted.request_id), 100)
        return [codec.decode(message.data, LogMessage) for message in messages]

    async def num_queued(self) -> int:
        return await self.bus.num_messages("REQUESTS")

    def owned(self) -> list[RequestId]:
        return [request_id for request_id, _ in self.core.ack_subjects()]

    def _wake(self) -> None:
        self.num_wakes += 1
