"""Fleets of schedulers on one broker, with workers that are scripted by hand, and a clock that only tests move."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from headrace_scheduler.decisions import Adoption
from headrace_scheduler.fleet import Fleet
from headrace_scheduler.scheduler import Scheduler
from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import Hello, LoadedAdapter, WorkerState
from headrace_shared.leases import Leases
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import (
    Adopt,
    ControlMessage,
    DrainVerdict,
    Grant,
    Progress,
    RequestId,
    SchedulerId,
    SequenceSnapshot,
    Snapshot,
    WorkerId,
)
from headrace_shared.subjects import LEASES, hello_subject, progress_subject
from tests.scheduler.shell_builders import MODEL, prepare

HELLO = Hello(
    worker=WorkerId("worker-1"),
    model=MODEL,
    state=WorkerState.READY,
    epoch=0,
    num_blocks=8,
    block_size=16,
    context=128,
    max_sequences=4,
    tokens_per_iteration=64,
)


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Site:
    """One scheduler's fleet on a shared broker."""

    def __init__(self, broker: MemoryBroker, clock: Clock, name: str = "scheduler-1") -> None:
        self.bus = MemoryBus(broker)
        self.id = SchedulerId(name)
        self.core = Scheduler()
        self.leases = Leases(self.bus, LEASES.name, name, clock)
        self.adoptions: list[Adoption] = []
        self.usurped: list[str] = []
        self.num_schedulers = 1
        self.present: set[str] = set()
        self.fleet = Fleet(
            lambda: self.core,
            self.bus,
            self.leases,
            self.id,
            clock=clock,
            wake=lambda: None,
            on_adoption=self._on_adoption,
            on_dropped=self._on_dropped,
            on_usurped=self.usurped.append,
            num_schedulers=lambda: self.num_schedulers,
            is_present=lambda peer: peer in self.present,
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await prepare(self.bus)
        await self.leases.open()
        await self.bus.subscribe("workers.m.*", self.fleet.on_hello)
        await self.bus.subscribe(progress_subject(self.id), self.fleet.on_report)
        self.tasks = [
            asyncio.create_task(self.fleet.run()),
            asyncio.create_task(self.leases.keep(self.fleet.on_lease_lost)),
        ]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def known(self) -> set[WorkerId]:
        return set(self.core.gauges().workers)

    def _on_dropped(self, request_ids: Sequence[RequestId]) -> None:
        """As if their logs held nothing more."""
        for request_id in request_ids:
            self.core.restore(request_id, {}, 0.0)

    def _on_adoption(self, _: WorkerId, adoption: Adoption, sequences: Sequence[SequenceSnapshot]) -> None:
        self.adoptions.append(adoption)
        self._on_dropped(adoption.dropped)


class HandWorker:
    """Answers an Adopt with an empty snapshot; everything else by hand."""

    def __init__(self, broker: MemoryBroker, name: str = "worker-1") -> None:
        self.bus = MemoryBus(broker)
        self.id = WorkerId(name)
        self.epoch = 0
        self.scheduler = SchedulerId("")
        self.number = 0
        self.grants: list[Grant] = []
        self.verdicts: list[DrainVerdict] = []
        self.num_adopted = 0
        self.answers = True
        self.holds: tuple[SequenceSnapshot, ...] = ()

    async def start(self) -> None:
        await self.bus.subscribe(f"grants.{self.id}", self._on_control)
        self.hello()

    def hello(self, state: WorkerState = WorkerState.READY, *adapters: LoadedAdapter) -> None:
        hello = replace(HELLO, worker=self.id, state=state, epoch=self.epoch, adapters=adapters)
        self.bus.publish(hello_subject(MODEL, self.id), codec.encode(hello))

    def progress(self, number: int | None = None, iterations: int = 0) -> None:
        self.number = self.number + 1 if number is None else number
        message = Progress(
            worker=self.id,
            epoch=self.epoch,
            number=self.number,
            grant_seen=max((grant.number for grant in self.grants if grant.epoch == self.epoch), default=0),
            num_iterations=iterations,
        )
        self.bus.publish(progress_subject(self.scheduler), codec.encode(message))

    def _on_control(self, message: Message) -> None:
        control: ControlMessage = codec.decode(message.data, ControlMessage)
        if isinstance(control, Grant):
            self.grants.append(control)
            return
        if isinstance(control, DrainVerdict):
            self.verdicts.append(control)
            return
        self.num_adopted += 1
        if self.answers:
            self.answer(control)

    def answer(self, adopt: Adopt) -> None:
        self.epoch, self.scheduler, self.number = adopt.epoch, adopt.scheduler, 0
        snapshot = Snapshot(worker=self.id, epoch=adopt.epoch, part=0, num_parts=1, sequences=self.holds)
        self.bus.publish(progress_subject(adopt.scheduler), codec.encode(snapshot))


class World:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.clock = Clock()
        self.sites: list[Site] = []

    async def site(self, name: str = "scheduler-1") -> Site:
        site = Site(self.broker, self.clock, name)
        await site.start()
        self.sites.append(site)
        return site

    async def worker(self, name: str = "worker-1") -> HandWorker:
        worker = HandWorker(self.broker, name)
        await worker.start()
        return worker

    async def pass_time(self, seconds: float, *talking: HandWorker) -> None:
        """Moves the clock in small steps, in which everybody may act; `talking` workers say Hello."""
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            for worker in talking:
                worker.hello()
                if worker.epoch:
                    worker.progress()
            await asyncio.sleep(0.12)
