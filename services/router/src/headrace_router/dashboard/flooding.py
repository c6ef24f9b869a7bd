"""Load that a person asks for on the live page.

The router makes it, since a browser keeps only six connections to one host and could not hold a rate. Each call goes
through the whole application, with the credentials of whoever asked for it, like any other; only the socket is missing.
It ends with its page: nobody can leave one behind.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import ASGIApp, Message, Scope

from headrace_router.dashboard.flood_plan import MAX_OPEN, FloodPlan, arrivals, body_of
from headrace_router.dashboard.flood_tally import FloodCall, FloodTally
from headrace_shared.errors import Overloaded
from headrace_shared.tasks import end

TELL_S = 0.5
DRAIN_S = 30.0
"""After the load, for answers that are still coming."""
PATH = "/v1/completions"
_HEADERS = (b"authorization", b"x-api-key", b"host")
"""Of the asking request: who pays."""


class Flooding:
    """One flood at a time for each router. They end when `draining` is set."""

    def __init__(self, draining: asyncio.Event) -> None:
        self._draining = draining
        self._is_running = False

    def check(self) -> None:
        """Raises Overloaded if there is one already."""
        if self._is_running:
            raise Overloaded("A flood is running already.", retry_after_s=5.0, code="flood_running")

    async def stream(self, plan: FloodPlan, model: str, scope: Scope) -> AsyncIterator[bytes]:
        """Server-sent events: how it goes, twice a second, and at last `event: done`."""
        if self._is_running:
            return  # both were let in before either had begun
        self._is_running = True
        run = _Run(plan, model, scope)
        work = asyncio.create_task(run.run(), name="flood")
        try:
            while not work.done() and not self._draining.is_set():
                await asyncio.wait((work,), timeout=TELL_S)
                yield b"data: " + msgspec.json.encode(run.tell()) + b"\n\n"
            if work.done():
                work.result()
            yield b"event: done\ndata: {}\n\n"
        finally:
            self._is_running = False
            await end(work)


class _Run:
    def __init__(self, plan: FloodPlan, model: str, scope: Scope) -> None:
        self._plan = plan
        self._model = model
        self._scope = scope
        self._app: ASGIApp = scope["app"]
        self._rng = random.Random()
        self._tally = FloodTally()
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()

    def tell(self) -> dict[str, object]:
        return self._tally.tell(self._now())

    async def run(self) -> None:
        self._started_at = self._loop.time()
        try:
            async with asyncio.timeout(self._plan.duration_s + DRAIN_S), asyncio.TaskGroup() as group:
                for due_at in arrivals(self._plan, self._rng):
                    await asyncio.sleep(max(0.0, due_at - self._now()))
                    if self._tally.num_open >= MAX_OPEN:
                        self._tally.leave_out()
                    else:
                        group.create_task(self._call(self._tally.begin(due_at)))
        except TimeoutError:
            pass  # what is still open is told as such

    async def _call(self, call: FloodCall) -> None:
        answer = _Answer(self._tally, call, self._now)
        body = body_of(self._plan, self._model, self._rng)
        chosen = [(name, value) for name, value in self._scope["headers"] if name in _HEADERS]
        scope = {
            **{key: self._scope[key] for key in ("type", "asgi", "http_version", "scheme", "server", "client")},
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*chosen, (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        }
        try:
            await self._app(scope, _Sender(body).receive, answer.send)
        finally:
            self._tally.end(call, answer.error)

    def _now(self) -> float:
        return self._loop.time() - self._started_at


class _Sender:
    """The client's side: a body, and then a connection that stays."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}


class _Answer:
    def __init__(self, tally: FloodTally, call: FloodCall, now: Callable[[], float]) -> None:
        self._tally = tally
        self._call = call
        self._now = now
        self._status = 0
        self._is_done = False

    @property
    def error(self) -> str:
        if self._status != 200:
            return f"http {self._status}" if self._status else "no answer"
        return "" if self._is_done else "broke off"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            data: bytes = message.get("body", b"")
            # Each event of the router's has a choice and a piece of text, but for [DONE] and the end of the choice.
            count = data.count(b'"text":"') - data.count(b'"text":""')
            self._tally.chunks(self._call, count, self._now())
            self._is_done = self._is_done or b"data: [DONE]" in data
            if b'data: {"error"' in data:
                self._status = 500
