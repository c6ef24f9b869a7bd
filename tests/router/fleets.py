"""A scripted worker that also says how fast it is, an autoscaler's figures, other routers, and prompts that wait, on
the in-memory bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count

from headrace_router.prompt import Prompt
from headrace_shared import telemetry
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import RouterLoad, Telemetry, WaitingGroup
from headrace_shared.messages import Lane, Request, RequestId, RouterId, SamplingParams, StopParams
from headrace_shared.subjects import loads_subject, telemetry_subject
from tests.byte_model import MODEL


def waiting(number: int, *, prompt_tokens: int = 10, output_tokens: int = 50, sequence: int = 1) -> WaitingGroup:
    return WaitingGroup(0, sequence, number, number, number * prompt_tokens, number * output_tokens)


def load_of(
    router: str, *groups: WaitingGroup, promises: bytes = b"", model: str = MODEL, newest_sequence: int = 0
) -> RouterLoad:
    return RouterLoad(
        router=RouterId(router), model=model, waiting=groups, promises=promises, newest_sequence=newest_sequence
    )


def prompt_of(lane: Lane, sequence: int) -> Prompt:
    request = Request(
        request_id=RequestId(f"{sequence:032x}"),
        router=RouterId("own"),
        model=MODEL,
        prompt=bytes(40),
        sampling=SamplingParams(seed=1),
        stop=StopParams(max_tokens=50),
        lane=lane,
    )
    prompt = Prompt(request, [])
    prompt.stream_sequence = sequence
    return prompt


def worker_figures(token_s: float) -> Iterator[Telemetry]:
    """Of a worker with 16 places whose iterations take `token_s`, whatever is in them."""
    busy_s = num_outputs = 0.0
    for number in count():
        gauges = {
            telemetry.BUSY_S: busy_s,
            telemetry.NUM_ITERATIONS: busy_s / token_s,
            telemetry.NUM_OUTPUT_TOKENS: num_outputs,
            telemetry.NUM_PREFILL_TOKENS: 10.0 * number,
        }
        yield Telemetry(service="worker", id="worker-1", state="ready", model=MODEL, gauges=gauges)
        busy_s += 0.1
        num_outputs += (1 + number % 16) * 0.1 / token_s


def autoscaler_figures(model: str, **gauges: float) -> Iterator[Telemetry]:
    named = {telemetry.of_model(name, model): value for name, value in gauges.items()}
    while True:
        yield Telemetry(service="autoscaler", id="autoscaler-1", state="ready", gauges=named)


@contextlib.asynccontextmanager
async def telling(bus: Bus, figures: Iterator[Telemetry], period_s: float = 0.02) -> AsyncIterator[None]:
    """Repeats, faster than the real ones do: how much time passed is in the figures."""

    def send() -> None:
        said = next(figures)
        bus.publish(telemetry_subject(said.service, said.id), encode(said))

    async with _repeating(send, period_s):
        yield


@contextlib.asynccontextmanager
async def loads(bus: Bus, *told: RouterLoad, period_s: float = 0.03) -> AsyncIterator[None]:
    def send() -> None:
        for load in told:
            bus.publish(loads_subject(load.router), encode(load))

    async with _repeating(send, period_s):
        yield


@contextlib.asynccontextmanager
async def _repeating(send: Callable[[], None], period_s: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            with contextlib.suppress(BusError):
                send()
            await asyncio.sleep(period_s)

    task = asyncio.create_task(repeat())
    try:
        await asyncio.sleep(10 * period_s)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
