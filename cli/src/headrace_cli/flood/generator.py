"""Makes the load: begins conversations when they are due, or keeps a number of them running."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from headrace_cli.flood.answer import StreamedAnswer
from headrace_cli.flood.arrivals import Arrival
from headrace_cli.flood.conversation import Author, Script
from headrace_cli.flood.http_client import ConnectionBroken, HttpClient
from headrace_cli.flood.meter import UNFINISHED, Exchange, Meter
from headrace_cli.flood.settings import MAX_REQUESTS, FloodSettings

PAUSE_S = 0.1
"""In a closed loop, after a failure: a server that refuses is not to be asked as fast as it can refuse."""
NOT_SENT = "not sent: too many open"

_encode = msgspec.json.Encoder().encode


class Generator:
    """One flood. Its clock stands at 0 when `run` begins."""

    def __init__(self, settings: FloodSettings, client: HttpClient, author: Author, meter: Meter) -> None:
        self._settings = settings
        self._client = client
        self._author = author
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._path = "/v1/chat/completions" if settings.endpoint == "chat" else "/v1/completions"
        self._started_at = 0.0
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._stopped_at = settings.duration
        self._failure: BaseException | None = None

    def now(self) -> float:
        return self._loop.time() - self._started_at

    def stop(self) -> None:
        """Begins nothing more and gives up what runs; `run` returns soon."""
        self._stopped_at = min(self._stopped_at, self.now())
        self._stop.set()

    @property
    def load_s(self) -> float:
        """How long load was made."""
        return self._stopped_at

    async def run(self, arrivals: Iterable[Arrival]) -> None:
        """`arrivals` in the order of time; of a closed loop none are needed."""
        self._started_at = self._loop.time()
        begin = self._begin_open(arrivals) if self._settings.is_open_loop else self._begin_closed()
        beginning = asyncio.create_task(begin, name="arrivals")
        try:
            await self._until_stopped({beginning}, self._settings.duration)
            if beginning.done():
                beginning.result()
            await self._until_stopped(self._tasks, self._settings.duration + self._settings.drain)
        finally:
            beginning.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(beginning, *self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    async def _until_stopped(self, tasks: "set[asyncio.Task[None]]", until: float) -> None:
        """Until all tasks are done, the time has come, or `stop` is called."""
        if not tasks:
            return
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        done = asyncio.create_task(asyncio.wait(set(tasks)), name="done")
        try:
            await asyncio.wait({stopped, done}, timeout=until - self.now(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            done.cancel()

    async def _begin_open(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            delay = arrival.at - self.now()
            if delay > 0:
                await asyncio.sleep(delay)
            elif self._number % 64 == 0:
                await asyncio.sleep(0)  # behind schedule: what was begun must get a turn
            script = self._next_script(arrival)
            if len(self._tasks) >= self._settings.max_open:
                exchange = self._meter.due(arrival.at)
                self._meter.ended(exchange, max(arrival.at, self.now()), NOT_SENT)
                continue
            self._spawn(self._converse_once(script, arrival.at))

    async def _begin_closed(self) -> None:
        for _ in range(self._settings.concurrency or 0):
            self._spawn(self._converse_for_ever())

    async def _converse_for_ever(self) -> None:
        while self.now() < self._settings.duration and self._number < MAX_REQUESTS:
            now = self.now()
            if not await self._converse(self._next_script(Arrival(now)), now):
                await asyncio.sleep(PAUSE_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._stop.set()

    def _next_script(self, arrival: Arrival) -> Script:
        self._number += 1
        return self._author.script(self._number - 1, arrival)

    async def _converse_once(self, script: Script, due_at: float) -> None:
        await self._converse(script, due_at)

    async def _converse(self, script: Script, due_at: float) -> bool:
        """One turn after the other; False if one failed, which is the last then."""
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(script.turns):
            if number:
                if turn.think_s:
                    await asyncio.sleep(turn.think_s)
                due_at = self.now()
                if due_at >= self._settings.duration:
                    return True
            messages.append({"role": "user", "content": self._author.message(script, number)})
            body = _encode(self._author.body(messages, turn))
            text = await self._ask(body, due_at, keeps_text=number + 1 < len(script.turns))
            if text is None:
                return False
            messages.append({"role": "assistant", "content": text})
        return True

    async def _ask(self, body: bytes, due_at: float, *, keeps_text: bool) -> str | None:
        """The answer's text, if it is wanted; None if there is no whole answer."""
        meter = self._meter
        exchange = meter.due(due_at)
        answer = StreamedAnswer(exchange, meter, self.now, keeps_text=keeps_text)
        error = UNFINISHED
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._client.send("POST", self._path, body, answer, self._on_sent(exchange))
            error = answer.error
        except TimeoutError:
            error = "timeout"
        except ConnectionBroken:
            error = answer.error if exchange.num_chunks else "connection broken"
        except OSError as problem:
            error = f"cannot connect ({type(problem).__name__})"
        finally:
            meter.ended(exchange, self.now(), error)
        return None if error else answer.text

    def _on_sent(self, exchange: Exchange) -> Callable[[], None]:
        return lambda: self._meter.sent(exchange, self.now())
