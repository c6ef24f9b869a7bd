"""A small byte-level model, a scripted worker on the in-memory bus, and a router that serves on a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from headrace_router.service import RouterService
from headrace_router.settings import RouterSettings
from headrace_router.web_server import listen
from headrace_shared.bus import Bus, Delivery, Message
from headrace_shared.codec import decode, encode, unpack_ids
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import Hello, LoadedAdapter, ModelCard, WorkerState
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.messages import (
    Cancel,
    FinishReason,
    Lane,
    Outcome,
    Request,
    RequestEnded,
    TokenFrame,
    TokenLogprobs,
    TopLogprob,
    WorkerId,
)
from headrace_shared.model_cards import store_card
from headrace_shared.service import Service
from headrace_shared.subjects import ALL_CANCELS, hello_subject, tokens_subject
from tests.byte_model import CONTEXT, END, MODEL, byte_ids, make_card
from tests.queues import whole_lane
from tests.router import described_once

described_once.install()

MESSAGES = [{"role": "user", "content": "Hi"}]

Script = Callable[["ScriptedWorker", Request], Awaitable[None]]


class ScriptedWorker:
    """Scheduler and worker in one: pulls requests and lets a script answer each."""

    def __init__(self, bus: Bus, script: Script, model: str = MODEL, lane: Lane = Lane.INTERACTIVE) -> None:
        self.bus = bus
        self._script = script
        self._spec = whole_lane(model, lane)
        self._model = model
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._deliveries: dict[str, Delivery] = {}
        self.requests: list[Request] = []
        self.cancels: list[Cancel] = []
        self.is_taking = True
        self.pull_timeout_s = 0.05
        self.adapters: tuple[LoadedAdapter, ...] = ()
        self.has_started = False

    async def run(self) -> None:
        subscription = await self.bus.subscribe(ALL_CANCELS, self._on_cancel)
        greeter = asyncio.create_task(self._greet())
        await self.bus.ensure_consumer(self._spec)
        self.has_started = True
        try:
            while True:
                if not self.is_taking:
                    await asyncio.sleep(0.01)
                    continue
                try:
                    delivery = await self.bus.pull(self._spec, self.pull_timeout_s)
                except BusError:
                    await asyncio.sleep(0.05)
                    continue
                if delivery is None:
                    continue
                request = decode(delivery.data, Request)
                self.requests.append(request)
                self._deliveries[request.request_id] = delivery
                self._tasks[request.request_id] = asyncio.create_task(self._serve(request, delivery))
        finally:
            greeter.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(greeter, *self._tasks.values(), return_exceptions=True)
            await subscription.close()

    def frame(
        self,
        request: Request,
        tokens: Sequence[int],
        index: int,
        *,
        choice: int = 0,
        attempt: int = 0,
        finish: FinishReason | None = None,
        num_cached: int = 0,
    ) -> None:
        num = request.sampling.num_logprobs
        logprobs = (
            tuple(TokenLogprobs(-0.5, tuple(TopLogprob(token, -0.5) for token in [*range(num)])) for _ in tokens)
            if num is not None
            else ()
        )
        frame = TokenFrame(
            request_id=request.request_id,
            choice=choice,
            attempt=attempt,
            index=index,
            tokens=tuple(tokens),
            logprobs=logprobs,
            finish=finish,
            num_cached=num_cached,
        )
        self.publish(request, frame)

    def publish(self, request: Request, event: TokenFrame | RequestEnded) -> None:
        self.bus.publish(tokens_subject(request.router, request.request_id), encode(event))

    async def _serve(self, request: Request, delivery: Delivery) -> None:
        await self._script(self, request)
        await self.end(request, Outcome.FINISHED)

    async def end(self, request: Request, outcome: Outcome, code: str = "", message: str = "") -> None:
        delivery = self._deliveries.pop(request.request_id, None)
        if delivery is None:
            return
        self.publish(request, RequestEnded(request_id=request.request_id, outcome=outcome, code=code, message=message))
        await self.bus.acknowledge(delivery.ack_subject)

    async def lose(self, request: Request) -> None:
        """Takes it out of the queue without a word, as nobody may."""
        await self.bus.acknowledge(self._deliveries.pop(request.request_id).ack_subject)

    def _on_cancel(self, message: Message) -> None:
        cancel = decode(message.data, Cancel)
        self.cancels.append(cancel)
        task = self._tasks.get(cancel.request_id)
        if cancel.choice is None and task is not None and not task.done():
            task.cancel()
            request = next(request for request in self.requests if request.request_id == cancel.request_id)
            self._tasks[cancel.request_id] = asyncio.create_task(self.end(request, Outcome.CANCELLED))

    async def _greet(self) -> None:
        while True:
            hello = Hello(
                worker=WorkerId("worker-1"),
                model=self._model,
                state=WorkerState.READY,
                epoch=1,
                num_blocks=64,
                block_size=16,
                context=CONTEXT,
                max_sequences=16,
                tokens_per_iteration=256,
                adapters=self.adapters,
            )
            with contextlib.suppress(BusError):
                self.bus.publish(hello_subject(self._model, WorkerId("worker-1")), encode(hello))
            await asyncio.sleep(0.1)


def says(text: str, finish: FinishReason = FinishReason.STOP, pause_s: float = 0.0) -> Script:
    """Each choice gets the text, one token a byte and a frame; with STOP an end-of-sequence token follows."""

    async def script(worker: ScriptedWorker, request: Request) -> None:
        tokens = byte_ids(text)[: request.stop.max_tokens]
        if finish is FinishReason.STOP and len(tokens) < request.stop.max_tokens:
            tokens = [*tokens, END]
            end = FinishReason.STOP
        else:
            end = FinishReason.LENGTH
        for i, token in enumerate(tokens):
            for choice in range(request.num_choices):
                last = end if i == len(tokens) - 1 else None
                worker.frame(request, [token], i, choice=choice, finish=last)
            await asyncio.sleep(pause_s)

    return script


class Router(NamedTuple):
    client: httpx.AsyncClient
    worker: ScriptedWorker
    bus: Bus
    broker: MemoryBroker
    """Of the in-memory buses; unused where others are given."""
    service: Service
    port: int


@contextlib.asynccontextmanager
async def running_router(
    script: Script,
    *,
    card: ModelCard | None = None,
    settings: RouterSettings | None = None,
    has_worker: bool = True,
    buses: tuple[Bus, Bus] | None = None,
) -> AsyncIterator[Router]:
    settings = settings or RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0)
    broker = MemoryBroker()
    bus, worker_bus = buses or (MemoryBus(broker), MemoryBus(broker))
    card = card or make_card()
    await store_card(worker_bus, card)
    service = Service("router")
    listener = listen("127.0.0.1", 0, 30.0)
    port = listener.getsockname()[1]
    worker = ScriptedWorker(worker_bus, script, card.model)
    router = RouterService(settings)
    running = asyncio.create_task(service.run(lambda own: router.serve(own, bus, listener), settings.drain_timeout_s))
    working: asyncio.Task[None] | None = None
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0, trust_env=False) as client:
            await _until_model(client, running)
            if has_worker:
                working = asyncio.create_task(worker.run())
                await until(lambda: worker.has_started)
            yield Router(client, worker, bus, broker, service, port)
        service.drain()
        await asyncio.wait_for(running, 10.0)
    finally:
        for task in (running, working):
            if task is not None:
                task.cancel()
        await asyncio.gather(running, *([working] if working else []), return_exceptions=True)
        listener.close()
        await bus.close()
        await worker_bus.close()


async def _until_model(client: httpx.AsyncClient, running: "asyncio.Task[int]") -> None:
    for _ in range(500):
        if running.done():
            raise AssertionError("the router ended at once") from running.exception()
        with contextlib.suppress(httpx.TransportError):
            reply = await client.get("/v1/models", timeout=0.5)
            if reply.status_code == 401 or reply.json()["data"]:
                return
        await asyncio.sleep(0.01)
    raise AssertionError("the router never knew its model")


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


def sse_events(text: str) -> list[Any]:
    """Decoded data of a complete stream; [DONE] stays as it is. Comments are dropped."""
    events: list[Any] = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return events


def prompt_of(request: Request) -> list[int]:
    return list(unpack_ids(request.prompt))
