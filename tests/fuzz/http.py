"""A running router, called in every way that it describes, and sent bytes that are nearly HTTP."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import httpx

from headrace_router.answering import HELD_ID
from headrace_router.settings import RouterSettings
from tests.byte_model import make_card
from tests.fuzz.cost import Meter, settle_loop
from tests.fuzz.fuzzing import NUM_ALONE, Findings, is_doubtful
from tests.fuzz.http_inputs import Operation, Sent, any_bytes, any_call, operations
from tests.router.batches.batch_support import batch_worker
from tests.router.scripts import scored_or_embedded
from tests.router.support import Router, running_router

RAW = "http: bytes"
PATIENCE_S, LAST_PATIENCE_S = 20.0, 120.0
"""By the clock, for a machine that is busy."""
RAW_S = 0.1
"""Bytes that begin a request and do not end it get no answer."""
ONE_IN_RAW = 4
MAX_IDS = 16
HANGS = "no answer"


class Reply(NamedTuple):
    status: int
    problem: str


class HttpFuzzer:
    """A status of 500 is a failure, and so are a connection that breaks, an answer that takes too long, and an
    exception that nobody awaits."""

    def __init__(self, router: Router, random: Random, findings: Findings, note: Callable[[bytes], None]) -> None:
        """`note` is told of each input before it is sent."""
        self._router, self._random, self._findings, self._note = router, random, findings, note
        self._ids: deque[str] = deque(maxlen=MAX_IDS)
        """That answers named."""
        self._last = b""

    async def run(self, num_runs: int) -> None:
        described = operations((await self._router.client.get("/openapi.json")).json())
        with self._listening():
            for _ in range(num_runs):
                if self._random.randrange(ONE_IN_RAW):
                    operation = self._random.choice(described)
                    await self._call(operation, any_call(self._random, operation, self._ids))
                else:
                    await self._send(any_bytes(self._random))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """To what nobody handles, in callbacks and in tasks."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            problem = f"{context.get('message')}: {context.get('exception')!r:.300}"
            self._findings.fail("http: the event loop", problem, self._last)

        loop.set_exception_handler(on_error)
        try:
            yield
        finally:
            loop.set_exception_handler(before)

    async def _call(self, operation: Operation, sent: Sent) -> None:
        async def attempt(patience_s: float) -> Reply:
            return await self._ask(sent, patience_s)

        await self._measure(operation.name, sent.as_bytes(), attempt)

    async def _send(self, data: bytes) -> None:
        async def attempt(_: float) -> Reply:
            return read_raw(await self._exchange(data))

        await self._measure(RAW, data, attempt)

    async def _measure(self, name: str, data: bytes, attempt: Callable[[float], Awaitable[Reply]]) -> None:
        self._last = data
        self._note(f"{name} {len(data)}\n".encode() + data)
        meter = Meter()
        reply = await attempt(PATIENCE_S)
        cost = meter.read()
        spent_s = cost.thread_s
        if reply.problem == HANGS or (not reply.problem and is_doubtful(cost)):
            self._findings.num_doubted[name] += 1
            spent_s = float("inf")
            for _ in range(NUM_ALONE):
                await settle_loop()
                meter = Meter()
                reply = await attempt(LAST_PATIENCE_S)
                spent_s = min(spent_s, meter.read().process_s)
        self._findings.num_accepted[name] += reply.status in range(200, 400)
        too_much = self._findings.note(name, spent_s, cost.growth_mib)
        if reply.problem or too_much:
            self._findings.fail(name, reply.problem or too_much, data)

    async def _ask(self, sent: Sent, patience_s: float) -> Reply:
        client = self._router.client
        try:
            reply = await client.request(
                sent.method, sent.url, content=sent.data, headers=sent.headers, timeout=patience_s
            )
        except httpx.TimeoutException:
            return Reply(0, HANGS)
        except httpx.TransportError as error:
            return Reply(0, f"{type(error).__name__}: {error}")
        try:
            self._remember(reply)
        except ValueError:
            return Reply(reply.status_code, "an answer that is no JSON")
        is_bad = reply.status_code >= 500 and reply.status_code != 503
        return Reply(reply.status_code, f"status {reply.status_code}" if is_bad else "")

    async def _exchange(self, data: bytes) -> bytes:
        answer = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._router.port)
        with contextlib.suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(RAW_S):
                while part := await reader.read(1 << 16):
                    answer += part
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer

    def _remember(self, reply: httpx.Response) -> None:
        """Raises ValueError."""
        if not reply.content or not reply.headers.get("content-type", "").startswith("application/json"):
            return
        content = reply.json()
        found = content.get("id") if isinstance(content, dict) else None
        for known in (found, reply.headers.get(HELD_ID)):
            if isinstance(known, str):
                self._ids.append(known)


def read_raw(answer: bytes) -> Reply:
    """`answer`: perhaps several, and perhaps none."""
    if not answer:
        return Reply(0, "")
    head = answer.split(b" ", 2)
    if head[0] != b"HTTP/1.1" or len(head) < 3:
        return Reply(0, "an answer that is no HTTP")
    return Reply(int(head[1]), "status 500" if b"HTTP/1.1 500" in answer else "")


async def fuzz_http(
    random: Random, num_runs: int, findings: Findings, note: Callable[[bytes], None] = lambda _: None
) -> None:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0)
    card = make_card(context=4096)
    async with (
        running_router(scored_or_embedded, settings=settings, card=card) as router,
        batch_worker(router, scored_or_embedded),
    ):
        await HttpFuzzer(router, random, findings, note).run(num_runs)
