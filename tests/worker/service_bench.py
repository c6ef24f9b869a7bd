"""A worker service on an in-process broker."""

import asyncio

from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import Adopt, Grant, SchedulerId, TokenFrame, WorkerId
from headrace_shared.service import Service
from headrace_shared.subjects import ALL_HELLOS, grants_subject
from headrace_worker.service import WorkerService
from headrace_worker.settings import WorkerSettings
from tests.worker.loop_builders import admission

MODULE = "tests.scripted_engine"
PROMPT = [7, 8, 9]


def grant_of(sequence_id: int, prompt: list[int], max_tokens: int = 4) -> Grant:
    return Grant(
        worker=WorkerId("w"),
        epoch=1,
        number=1,
        progress_seen=0,
        admissions=(admission(sequence_id, prompt, range(4), max_tokens=max_tokens),),
    )


class Bench:
    """A worker service on an in-process broker, run as `run_service` would."""

    def __init__(self, **settings: object) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        values = {"engine_module": MODULE, "model": "scripted", "hang_timeout_s": 1.0, **settings}
        self.settings = WorkerSettings(**values)  # type: ignore[arg-type]  # tests pass what the fields take
        self.service = Service("worker", "worker-1")
        self.hellos: list[Hello] = []
        self.tokens: list[int] = []
        self.task: asyncio.Task[int] | None = None

    async def start(self) -> None:
        ear = MemoryBus(self.broker)
        await ear.subscribe(ALL_HELLOS, lambda message: self.hellos.append(codec.decode(message.data, Hello)))
        await ear.subscribe("tokens.*.*", self._on_token)
        worker = WorkerService(self.service, self.bus, self.settings)
        self.task = asyncio.create_task(self.service.run(lambda _: worker.run(), 10.0))

    async def until_state(self, state: WorkerState) -> None:
        async with asyncio.timeout(20.0):
            while not any(hello.state is state for hello in self.hellos):
                assert self.task is not None and not self.task.done(), self.task
                await asyncio.sleep(0.01)

    def control(self, message: Adopt | Grant) -> None:
        MemoryBus(self.broker).publish(grants_subject(WorkerId("worker-1")), codec.encode(message))

    def run_prompt(self, prompt: list[int], max_tokens: int) -> None:
        self.control(Adopt(worker=WorkerId("worker-1"), scheduler=SchedulerId("scheduler-1"), epoch=1))
        self.control(
            Grant(
                worker=WorkerId("worker-1"),
                epoch=1,
                number=1,
                progress_seen=0,
                admissions=(admission(1, prompt, range(8), max_tokens=max_tokens),),
            )
        )

    def _on_token(self, message: Message) -> None:
        self.tokens.extend(codec.decode(message.data, TokenFrame).tokens)
