"""`headrace dead` on a real broker."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from headrace_shared import codec
from headrace_shared.broker import NatsServer
from headrace_shared.errors import BusRefused, BusUnavailable
from headrace_shared.messages import Audience, Lane, Request, RequestId
from headrace_shared.nats_bus import NatsBus
from headrace_shared.record_messages import DeadRequest
from headrace_shared.subjects import DEAD, dead_subject, requests_stream
from tests.cli.broker_command import BrokerCommand, broker_command
from tests.queues import whole_lane
from tests.shared.samples import SAMPLES

pytestmark = pytest.mark.nats

IDS = [RequestId(f"{number:032x}") for number in range(1, 4)]


def dead(number: int, *, with_prompt: bool) -> DeadRequest:
    sample: Any = SAMPLES["DeadRequest"]
    request: Request = replace(sample.request, request_id=IDS[number], lane=Lane.INTERACTIVE, audience=Audience.ROUTER)
    made: DeadRequest = replace(sample, request_id=IDS[number], request=request if with_prompt else None)
    return made


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_server.url, name="test", on_closed=lambda: None)
    await bus.ensure_stream(DEAD)
    await bus.ensure_stream(requests_stream(100, 1 << 20))
    await bus.ensure_consumer(whole_lane("tiny", Lane.BATCH))
    for number in range(3):
        entry = dead(number, with_prompt=number != 0)
        await bus.enqueue(dead_subject("tiny", entry.request_id), codec.encode(entry), message_id=entry.request_id)
    yield bus
    await bus.close()


@pytest.fixture
def headrace_dead(nats_server: NatsServer, capsys: pytest.CaptureFixture[str]) -> BrokerCommand:
    return broker_command("dead", nats_server.url, capsys)


async def test_lists_and_shows_without_a_word_of_the_prompt(bus: NatsBus, headrace_dead: BrokerCommand) -> None:
    listed = await headrace_dead("list")
    assert listed.code == 0 and all(name in listed.out for name in IDS) and "two workers died" in listed.out
    shown = await headrace_dead("show", IDS[1])
    assert "worker-01234567: silent" in shown.out and "kept" in shown.out and IDS[0] not in shown.out
    told = json.loads((await headrace_dead("show", IDS[0], IDS[1], "--json")).out)
    assert [entry["has_prompt"] for entry in told] == [False, True]
    assert all("request" not in entry and "prompt" not in entry for entry in told)


async def test_a_requeued_request_runs_in_the_background_under_a_new_id(
    bus: NatsBus, headrace_dead: BrokerCommand
) -> None:
    ran = await headrace_dead("requeue", IDS[1])
    assert ran.code == 0
    delivery = await bus.pull(whole_lane("tiny", Lane.BATCH), 5.0)
    assert delivery is not None
    request = codec.decode(delivery.data, Request)
    assert request.request_id not in IDS and f"{IDS[1]} goes on as {request.request_id}" in ran.out
    assert (request.lane, request.audience, request.timeout_s) == (Lane.BATCH, Audience.NONE, 0.0)
    assert request.prompt == dead(1, with_prompt=True).request.prompt  # type: ignore[union-attr]  # it has one
    assert await bus.num_messages(DEAD.name) == 2


async def test_a_requeue_that_was_cut_off_is_repeated_as_the_same_request(
    bus: NatsBus, headrace_dead: BrokerCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> bool:
        raise BusUnavailable("scripted failure")

    with monkeypatch.context() as patched:
        patched.setattr(NatsBus, "delete", fails)
        assert (await headrace_dead("requeue", IDS[1])).code == 1
    assert (await headrace_dead("requeue", IDS[1])).code == 0
    assert (await bus.num_messages("REQUESTS"), await bus.num_messages(DEAD.name)) == (1, 2)


async def test_commands_neither_make_nor_change_the_stream(bus: NatsBus, headrace_dead: BrokerCommand) -> None:
    api = bus._streams  # for what no service does: another setting, deletion
    before = (await api.must("STREAM.INFO.DEAD"))["config"] | {"max_msgs": 7}
    await api.must("STREAM.UPDATE.DEAD", before)
    assert IDS[0] in (await headrace_dead("list")).out
    assert (await api.must("STREAM.INFO.DEAD"))["config"]["max_msgs"] == 7
    await api.must("STREAM.DELETE.DEAD")
    assert (await headrace_dead("list")).out == "No request was given up.\n"
    assert "no dead request" in (await headrace_dead("show", IDS[0])).err
    with pytest.raises(BusRefused):
        await bus.num_messages(DEAD.name)


async def test_without_its_prompt_it_stays(bus: NatsBus, headrace_dead: BrokerCommand) -> None:
    ran = await headrace_dead("requeue", IDS[0])
    assert ran.code == 1 and "was not kept" in ran.err and "--dead-prompts" in ran.err
    assert await bus.num_messages(DEAD.name) == 3


async def test_dropped_ones_are_gone(bus: NatsBus, headrace_dead: BrokerCommand) -> None:
    assert (await headrace_dead("drop", IDS[0])).out == "1 dropped.\n"
    assert (await headrace_dead("drop", "all")).out == "2 dropped.\n"
    assert (await headrace_dead("list")).out == "No request was given up.\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("bury",), 2, "bury: one of list, show, requeue, drop"),
        (("show",), 2, "which requests"),
        (("list", "x"), 2, "unexpected argument"),
        (("show", "f" * 32), 1, "no dead request"),
        (("drop", "a.*"), 2, "no request id"),
    ],
)
async def test_mistakes_are_named(
    bus: NatsBus, headrace_dead: BrokerCommand, arguments: tuple[str, ...], code: int, text: str
) -> None:
    ran = await headrace_dead(*arguments)
    assert ran.code == code and text in ran.err
    assert await bus.num_messages(DEAD.name) == 3
