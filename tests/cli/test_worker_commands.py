"""`headrace drain`, `park` and `promote` on a real broker, with a worker that answers by hand."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_cli import worker_commands
from headrace_cli.commands import run
from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.fleet_messages import CommandKind, CommandReply, WorkerCommand, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import commands_subject, replies_subject

pytestmark = pytest.mark.nats

WORKER = WorkerId("worker-1")


class HandWorker:
    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.heard: list[WorkerCommand] = []
        self.is_accepted = True

    def on_command(self, message: Message) -> None:
        command = codec.decode(message.data, WorkerCommand)
        self.heard.append(command)
        for command_id in ("of-another", command.command_id):
            reply = CommandReply(
                worker=WORKER,
                command_id=command_id,
                is_accepted=self.is_accepted,
                state=WorkerState.DRAINING,
                message="work waits" if not self.is_accepted else "it drains",
            )
            self.bus.publish(replies_subject(command.sender), codec.encode(reply))


@pytest.fixture
async def worker(nats_server: NatsServer) -> AsyncIterator[HandWorker]:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    worker = HandWorker(bus)
    await bus.subscribe(commands_subject(WORKER), worker.on_command)
    yield worker
    await bus.close()


@pytest.fixture
def headrace(nats_server: NatsServer, capsys: pytest.CaptureFixture[str]) -> Any:
    async def ran(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, [*arguments, "--nats-url", nats_server.url])
        return code, *capsys.readouterr()

    return ran


@pytest.mark.parametrize("kind", CommandKind)
async def test_tells_the_worker_and_prints_what_it_says(worker: HandWorker, headrace: Any, kind: CommandKind) -> None:
    assert await headrace(kind.value, WORKER) == (0, "worker-1: it drains\n", "")
    [command] = worker.heard
    assert (command.kind, command.worker, command.epoch) == (kind, WORKER, 0)


async def test_a_refusal_is_a_failure_with_its_reason(worker: HandWorker, headrace: Any) -> None:
    worker.is_accepted = False
    code, _, told = await headrace("drain", WORKER)
    assert (code, told) == (1, "headrace drain: worker-1 does not drain; work waits\n")


async def test_nobody_answers(worker: HandWorker, headrace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_commands, "ANSWER_S", 0.3)
    code, _, told = await headrace("park", "worker-2")
    assert code == 1 and "worker-2 does not answer" in told


@pytest.mark.parametrize("arguments", [("drain",), ("drain", "a.b"), ("drain", ">"), ("promote", "worker-1", "more")])
async def test_wrong_arguments_are_named(headrace: Any, arguments: tuple[str, ...]) -> None:
    code, _, told = await headrace(*arguments)
    assert code == 2 and told.startswith(f"headrace {arguments[0]}: ")
