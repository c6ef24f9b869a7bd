"""Many timing-model workers in one real process, at a real broker."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import Hello, WorkerState
from headrace_shared.messages import Adopt, Grant, SchedulerId, WorkerId
from headrace_shared.model_cards import load_card
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import ALL_HELLOS, grants_subject
from tests.worker.loop_builders import admission

DEADLINE_S = 60.0


@asynccontextmanager
async def hosted(server: NatsServer, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "headrace_cli", "sim-worker", "--nats-url", server.url, *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env={**os.environ})
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


class Hellos:
    """The last one of each worker."""

    def __init__(self) -> None:
        self.of: dict[WorkerId, Hello] = {}
        self.failures: list[str] = []

    def __call__(self, message: Message) -> None:
        hello = codec.decode(message.data, Hello)
        self.of[hello.worker] = hello
        if hello.failure and hello.failure not in self.failures:
            self.failures.append(hello.failure)

    def in_state(self, state: WorkerState) -> list[WorkerId]:
        return sorted(worker for worker, hello in self.of.items() if hello.state is state)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing tells when a message has changed it
            await asyncio.sleep(0.05)


@pytest.mark.nats
@pytest.mark.model
async def test_each_of_many_workers_in_a_process_is_a_worker_of_its_own(nats_server: NatsServer) -> None:
    hellos = Hellos()
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    try:
        await bus.subscribe(ALL_HELLOS, hellos)
        flags = ("--workers", "4", "--service-id", "host", "--served-name", "sim", "--timing-crash-after", "20")
        async with hosted(nats_server, *flags) as process:
            await _until(lambda: len(hellos.in_state(WorkerState.READY)) == 4)
            assert hellos.in_state(WorkerState.READY) == [f"host-{number}" for number in (1, 2, 3, 4)]
            card = await load_card(bus, "sim")
            assert card is not None and card.vocab_size == 49_152 and len(card.tokenizer) > 1_000_000

            # One is given more than it survives: it alone is gone, and says why.
            victim = WorkerId("host-2")
            bus.publish(grants_subject(victim), codec.encode(Adopt(worker=victim, scheduler=SchedulerId("s"), epoch=1)))
            work = (admission(1, [5000, 6000], range(10), max_tokens=100),)
            grant = Grant(worker=victim, epoch=1, number=1, progress_seen=0, admissions=work)
            bus.publish(grants_subject(victim), codec.encode(grant))
            await _until(lambda: hellos.in_state(WorkerState.LEAVING) == [victim])
            assert hellos.failures == ["the engine process ended with exit code 1"]
            assert len(hellos.in_state(WorkerState.READY)) == 3 and process.returncode is None

            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                _, log = await process.communicate()
            assert process.returncode == 1 and b"1 of 4 workers failed, the last one host-2" in log
            assert not hellos.in_state(WorkerState.READY)
    finally:
        await bus.close()


@pytest.mark.nats
@pytest.mark.model
@pytest.mark.parametrize("workers", ["1", "3"])
async def test_a_setting_that_cannot_be_ends_the_process_with_one_line(nats_server: NatsServer, workers: str) -> None:
    flags = ("--workers", workers, "--gpu-model", "llama-3.1-70b", "--log-level", "error")
    async with hosted(nats_server, *flags) as process, asyncio.timeout(DEADLINE_S):
        _, log = await process.communicate()
        assert process.returncode == 2
        assert log.decode().splitlines()[-1].startswith("headrace-worker: gpu_model: llama-3.1-70b needs 141 GB")
