"""Schedulers and workers as processes on a real broker, and a client that stands in for a router."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from headrace_shared import codec
from headrace_shared.bus import Message
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import CommandKind, CommandReply, Hello, Telemetry, WorkerCommand, WorkerState
from headrace_shared.messages import (
    Cancel,
    CancelReason,
    FinishReason,
    Lane,
    LogMessage,
    Outcome,
    Request,
    RequestEnded,
    RequestId,
    RouterId,
    SamplingParams,
    StopParams,
    TokenFrame,
    TokenLogprobs,
    WorkerId,
)
from headrace_shared.nats_bus import NatsBus
from headrace_shared.subjects import (
    ALL_HELLOS,
    ALL_TELEMETRY,
    CANCELS,
    TOKENS,
    all_tokens_of,
    cancel_subject,
    commands_subject,
    replies_subject,
    requests_stream,
    tokens_subject,
)
from tests.patience import PATIENCE_S
from tests.queues import request_subject
from tests.scripted_engine import expected_output
from tests.search_path import with_tests

MODEL = "scripted"
PROMPT = list(range(100, 140))


@dataclass
class Heard:
    """What a router would know of one request."""

    request: Request
    stream_sequence: int
    outputs: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finishes: dict[int, FinishReason] = field(default_factory=dict)
    attempts: dict[int, set[int]] = field(default_factory=dict)
    endings: list[RequestEnded] = field(default_factory=list)
    num_repeated: int = 0
    """Tokens that came again."""
    num_cached: int = 0
    gap: int | None = None
    """Index of the first token that was heard too early."""
    num_gaps: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: TokenFrame | RequestEnded) -> None:
        self.changed.set()
        if isinstance(message, RequestEnded):
            self.endings.append(message)
            self.ended.set()
            return
        self.attempts.setdefault(message.choice, set()).add(message.attempt)
        output = self.outputs.setdefault(message.choice, [])
        self.num_cached = max(self.num_cached, message.num_cached)
        if message.index > len(output):
            self.num_gaps += self.gap is None
            self.gap = message.index
            return
        overlap = len(output) - message.index
        self.num_repeated += min(overlap, len(message.tokens))
        assert list(message.tokens[:overlap]) == output[message.index : message.index + len(message.tokens[:overlap])]
        output.extend(message.tokens[overlap:])
        self.logprobs.setdefault(message.choice, []).extend(message.logprobs[overlap:])
        if self.gap is not None and len(output) > self.gap:
            self.gap = None
        if message.finish is not None:
            self.finishes[message.choice] = message.finish


class Client:
    """Submits requests and follows their token logs. Also tells workers what to become."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.router = RouterId(f"router-{secrets.token_hex(4)}")
        self.requests: dict[str, Heard] = {}
        self.telemetry: dict[str, Telemetry] = {}
        self.states: dict[str, WorkerState] = {}
        self.replies: dict[str, CommandReply] = {}
        self._repairs: dict[str, asyncio.Task[None]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, *, hears_tokens: bool = True) -> "AsyncIterator[Client]":
        """Without `hears_tokens` only the endings are heard, so that a benchmark's client costs nothing."""
        bus = await NatsBus.connect(url, name="test-client", on_closed=lambda: None)
        client = cls(bus)
        try:
            for spec in (requests_stream(10_000, 1 << 30), TOKENS, CANCELS):
                await bus.ensure_stream(spec)
            await bus.subscribe(all_tokens_of(client.router), client._on_log if hears_tokens else client._on_any)
            await bus.subscribe(ALL_TELEMETRY, client._on_telemetry)
            await bus.subscribe(ALL_HELLOS, client._on_hello)
            await bus.subscribe(replies_subject(client.router), client._on_reply)
            yield client
        finally:
            for task in list(client._repairs.values()):
                task.cancel()
            await asyncio.gather(*client._repairs.values(), return_exceptions=True)
            await bus.close()

    async def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 16,
        seed: int = 0,
        num_choices: int = 1,
        lane: Lane = Lane.INTERACTIVE,
        stop_token_ids: tuple[int, ...] = (),
        num_logprobs: int | None = None,
    ) -> Heard:
        request = Request(
            request_id=RequestId(secrets.token_hex(16)),
            router=self.router,
            model=MODEL,
            prompt=codec.pack_ids(prompt),
            sampling=SamplingParams(seed=seed, num_logprobs=num_logprobs),
            stop=StopParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
            num_choices=num_choices,
            lane=lane,
        )
        heard = self.requests[request.request_id] = Heard(request, 0)
        heard.stream_sequence = await self.bus.enqueue(
            request_subject(MODEL, lane, 0), codec.encode(request), message_id=request.request_id
        )
        return heard

    def cancel(self, heard: Heard, reason: CancelReason = CancelReason.CLIENT, choice: int | None = None) -> None:
        request_id = heard.request.request_id
        self.bus.publish(
            cancel_subject(request_id), codec.encode(Cancel(request_id=request_id, reason=reason, choice=choice))
        )

    async def command(self, worker: str, kind: CommandKind, epoch: int = 0) -> CommandReply:
        """What it answers."""
        command_id = secrets.token_hex(8)
        command = WorkerCommand(
            worker=WorkerId(worker),
            kind=kind,
            command_id=command_id,
            sender=self.router,
            epoch=epoch,
            sent_at=time.time(),
        )
        self.bus.publish(commands_subject(WorkerId(worker)), codec.encode(command))
        await until(lambda: command_id in self.replies, what=f"an answer of {worker} to {kind}")
        return self.replies[command_id]

    async def log_of(self, heard: Heard) -> list[TokenFrame | RequestEnded]:
        messages = await self.bus.read(TOKENS.name, tokens_subject(self.router, heard.request.request_id), 100_000)
        return [codec.decode(message.data, LogMessage) for message in messages]

    async def num_queued(self) -> int:
        return await self.bus.num_messages("REQUESTS")

    def gauge(self, service_id: str, name: str) -> float | None:
        telemetry = self.telemetry.get(service_id)
        return None if telemetry is None else telemetry.gauges.get(name)

    def _on_any(self, message: Message) -> None:
        if len(message.data) < 120 and b"RequestEnded" in message.data:
            self._on_log(message)

    def _on_log(self, message: Message) -> None:
        event: LogMessage = codec.decode(message.data, LogMessage)
        heard = self.requests.get(event.request_id)
        if heard is not None:
            heard.take(event)
            if heard.gap is not None and heard.request.request_id not in self._repairs:
                self._repairs[heard.request.request_id] = asyncio.create_task(self._repair(heard))

    async def _repair(self, heard: Heard) -> None:
        """As a router does: what was missed is in the token log."""
        try:
            while heard.gap is not None:
                await asyncio.sleep(0.1)
                with contextlib.suppress(BusError):
                    for event in await self.log_of(heard):
                        if isinstance(event, TokenFrame):
                            heard.take(event)
        finally:
            del self._repairs[heard.request.request_id]

    def _on_hello(self, message: Message) -> None:
        hello = codec.decode(message.data, Hello)
        self.states[hello.worker] = hello.state

    def _on_reply(self, message: Message) -> None:
        reply = codec.decode(message.data, CommandReply)
        self.replies[reply.command_id] = reply

    def _on_telemetry(self, message: Message) -> None:
        telemetry = codec.decode(message.data, Telemetry)
        self.telemetry[telemetry.id] = telemetry


class Broker(Protocol):
    @property
    def url(self) -> str: ...


class Deployment:
    """Processes on one broker. Ends them all when left."""

    def __init__(self, server: Broker, log_dir: Path) -> None:
        self._server = server
        self._log_dir = log_dir
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def scheduler(
        self, name: str = "scheduler-1", *, launcher: Sequence[str] = (), **settings: object
    ) -> asyncio.subprocess.Process:
        """`launcher`: a module that runs modules, with its arguments, such as a profiler."""
        return await self._start("headrace_scheduler", name, settings, {}, launcher)

    async def worker(
        self,
        name: str = "worker-1",
        *,
        step_s: float = 0.002,
        looks_ahead: bool = True,
        checks: bool = True,
        engine: str = "tests.scripted_engine",
        **settings: object,
    ) -> asyncio.subprocess.Process:
        """`engine`: `tests.scripted_text` answers through a router."""
        script = {
            "SCRIPTED_STEP_S": str(step_s),
            "SCRIPTED_LOOKS_AHEAD": str(int(looks_ahead)),
            "SCRIPTED_CHECKS": str(int(checks)),
        }
        settings = {"engine_module": engine, **settings}
        return await self._start("headrace_worker", name, settings, script)

    async def simulated_workers(self, name: str, **settings: object) -> asyncio.subprocess.Process:
        """One process of workers with timing-model engines."""
        settings = {"engine": "timing", "model": "smollm2-135m", "served_name": MODEL, **settings}
        return await self._start("headrace_worker", name, settings, {})

    async def router(self, name: str = "router-1", **settings: object) -> str:
        """Returns its base URL, where it may not listen yet."""
        port = free_port()
        await self._start("headrace_router", name, {"port": port, "drain_delay_s": 0, **settings}, {})
        return f"http://127.0.0.1:{port}"

    async def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    async def stop(self, name: str, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM; returns the exit code."""
        process = self.processes.pop(name)
        process.terminate()
        async with asyncio.timeout(timeout_s):
            return await process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def log(self, name: str) -> str:
        return (self._log_dir / f"{name}.log").read_text()

    async def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.processes.clear()

    async def _start(
        self,
        module: str,
        name: str,
        settings: dict[str, object],
        extra: dict[str, str],
        launcher: Sequence[str] = (),
    ) -> asyncio.subprocess.Process:
        settings = {"nats_url": self._server.url, "service_id": name, "model": MODEL, **settings}
        environ = {f"HEADRACE_{key.upper()}": str(value) for key, value in settings.items()}
        with (self._log_dir / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(["-m", *launcher] if launcher else []),
                "-m",
                module,
                env={**os.environ, "PYTHONPATH": with_tests(os.environ), **environ, **extra},
                stderr=log,
            )
        self.processes[name] = process
        return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def status_of(client: httpx.AsyncClient, path: str) -> int:
    """0 while nobody listens there."""
    with contextlib.suppress(httpx.TransportError):
        return (await client.get(path, timeout=10.0)).status_code
    return 0


async def until_status(client: httpx.AsyncClient, path: str, status: int, timeout_s: float = PATIENCE_S) -> float:
    """Returns the seconds it took."""
    start = time.monotonic()
    while (seen := await status_of(client, path)) != status:
        assert time.monotonic() - start < timeout_s, f"{path}: {seen}, not {status}, after {timeout_s} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - start


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "") -> float:
    """Waits for a condition; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def ended(*requests: Heard, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        for heard in requests:
            await heard.ended.wait()


async def until_empty(client: Client, timeout_s: float = PATIENCE_S) -> None:
    """The queue is empty: every message is acknowledged."""
    deadline = time.monotonic() + timeout_s
    while await client.num_queued():
        assert time.monotonic() < deadline, f"{await client.num_queued()} messages left in the queue"
        await asyncio.sleep(0.02)


def assert_complete(heard: Heard, num_tokens: int) -> None:
    """One ending, and every token once and in order."""
    prompt = codec.unpack_ids(heard.request.prompt).tolist()
    for choice in range(heard.request.num_choices):
        assert heard.outputs[choice] == expected_output(prompt, heard.request.sampling.seed, choice, num_tokens)
        assert heard.finishes[choice] is FinishReason.LENGTH
    assert [event.outcome for event in heard.endings] == [Outcome.FINISHED]


async def blocks_return(client: Client, *workers: str) -> None:
    """Every worker holds nothing, by its own account and the scheduler's."""
    for worker in workers:
        await until(
            lambda worker=worker: client.gauge(worker, "num_free_blocks") == client.gauge(worker, "num_blocks"),  # type: ignore[misc]  # a default binds it
            what=f"{worker}: {client.telemetry.get(worker)}",
        )
