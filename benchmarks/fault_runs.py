"""The long runs of `benchmarks.faults`: each does one kind of harm to a fleet under load, and says what came of it."""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from headrace_shared.broker import NatsServer
from headrace_shared.bus import Message
from headrace_shared.nats_bus import NatsBus
from headrace_shared.quantiles import quantile
from tests.e2e.api import TEXT, body_of
from tests.faults import script
from tests.faults.crowd import Crowd
from tests.faults.disturbances import freeze_in_turn, kill_in_turn
from tests.faults.fleet import Fleet, Shape
from tests.faults.jobs import MODEL, Job, Verdict, keep_busy, uninterrupted
from tests.integration.deployment import until_empty

NUM_CLIENTS = 16
NUM_LEAVERS = 64
STEP_S = 0.03
MAX_STALL_S = 5.0
MAX_SLOPE_MB_PER_MIN = 1.0
SAMPLE_S = 2.0
SETTLE_S = 5.0
"""Until what clients have left behind is gone, and told in the next second's telemetry."""
SLACK = 2
"""Connections of probes and the like that are open at the moment of a count."""
SOAK_BLOCKS = 112
"""Of a worker's cache, whose memory is taken as it fills for the first time: all are in use before the count begins."""
WARM_UP = 0.3
"""Share of a soak that counts for nothing: caches fill, pools grow."""


class Line(NamedTuple):
    """One line of the verdict."""

    name: str
    figure: str
    holds: bool


class Runs:
    """`is_real`: with SmolLM2, else with the scripted engine."""

    def __init__(self, folder: Path, seed: int, is_real: bool) -> None:
        self._folder = folder
        self._seed = seed
        self._is_real = is_real

    async def kills(self, count: int) -> list[Line]:
        async with self._fleet("kills") as (fleet, jobs):
            crowd, stop = Crowd(fleet.urls, self._seed), asyncio.Event()
            busy = asyncio.create_task(keep_busy(crowd, jobs, NUM_CLIENTS, self._seed, stop))
            killed = await kill_in_turn(fleet, count, self._seed, (3.0, 6.0), within_s=60.0 * count)
            stop.set()
            verdict = await busy
            await until_empty(fleet.client, timeout_s=60.0)
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(killed.items()))
        return [Line("killed", kinds, killed.total() == count), *lines_of(verdict)]

    async def freezes(self, frozen_s: float) -> list[Line]:
        async with self._fleet("freezes") as (fleet, jobs):
            crowd, stop = Crowd(fleet.urls, self._seed, silence_s=3.0), asyncio.Event()
            busy = asyncio.create_task(keep_busy(crowd, jobs, NUM_CLIENTS, self._seed, stop))
            await freeze_in_turn(fleet, frozen_s, 5.0)
            stop.set()
            verdict = await busy
            await until_empty(fleet.client, timeout_s=60.0)
        # Clients need silence_s to notice a frozen router; that is theirs.
        return lines_of(verdict, max_stall_s=MAX_STALL_S + 3.0)

    async def broker(self) -> list[Line]:
        """kill -9 of the broker under load, and a new start on the same disk."""
        async with self._fleet("broker") as (fleet, jobs):
            crowd, stop = Crowd(fleet.urls, self._seed), asyncio.Event()
            busy = asyncio.create_task(keep_busy(crowd, jobs, NUM_CLIENTS, self._seed, stop))
            await asyncio.sleep(5.0)
            await fleet.server.kill()
            await asyncio.sleep(1.0)
            await fleet.server.start()
            back_at = time.monotonic()
            fresh = await Crowd(fleet.urls, self._seed + 1).ask(TEXT, jobs[0].body)
            first_s = time.monotonic() - back_at - sum(fresh.stalls_s[1:])
            await asyncio.sleep(5.0)
            stop.set()
            verdict = await busy
            await until_empty(fleet.client, timeout_s=60.0)
        fresh_line = Line("new traffic after it is back", f"{first_s:.1f} s", fresh.is_complete and first_s <= 5.0)
        return [fresh_line, *lines_of(verdict, max_stall_s=30.0)]

    async def disconnects(self, count: int) -> list[Line]:
        """Clients that leave at random moments; the scripted engine, since the model adds nothing but time."""
        shape = script.shape(STEP_S, routers=1, schedulers=1, workers=1)
        async with (
            self._server("disconnects") as server,
            Fleet.of(server, self._folder / "disconnects", shape) as fleet,
        ):
            leavers = Leavers(fleet, self._seed)
            await leavers.leave(200)  # what is opened lazily is open before the first count
            await asyncio.sleep(SETTLE_S)
            before = await footprint(fleet)
            async with leavers.watching():
                await leavers.leave(count)
            await asyncio.sleep(SETTLE_S)
            after = await footprint(fleet)
            await until_empty(fleet.client, timeout_s=60.0)
        late = quantile(leavers.overruns_s, 0.99) if leavers.overruns_s else 0.0
        lines = [
            Line("disconnects", str(leavers.num_left), leavers.num_left >= count),
            Line("tokens after the client has left, p99", f"{late * 1000:.0f} ms", late <= STEP_S + 0.25),
        ]
        for name, value in before.items():
            growth = value - after[name] if name.startswith("free blocks") else after[name] - value
            lines.append(Line(name, f"{value:g} before, {after[name]:g} after", growth <= SLACK))
        return lines

    async def soak(self, minutes: float) -> list[Line]:
        async with self._fleet("soak", num_blocks=SOAK_BLOCKS) as (fleet, jobs):
            crowd, stop = Crowd(fleet.urls, self._seed), asyncio.Event()
            busy = asyncio.create_task(keep_busy(crowd, jobs, NUM_CLIENTS, self._seed, stop))
            places = [place for kind in ("router", "scheduler", "worker") for place in fleet.places(kind)]
            samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
            started_at = time.monotonic()
            while (now_s := time.monotonic() - started_at) < 60 * minutes:
                for place in places:
                    process = psutil.Process(fleet.pid_of(place))
                    total = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
                    samples[place].append((now_s / 60, total / 2**20))
                crowd.calls = [call for call in crowd.calls if not call.is_complete]  # ours must not grow either
                await asyncio.sleep(SAMPLE_S)
            stop.set()
            verdict = await busy
        lines = []
        for place, points in samples.items():
            slope = slope_of(points[int(WARM_UP * len(points)) :])
            lines.append(Line(f"memory of {place}", f"{slope:+.2f} MB/min", slope <= MAX_SLOPE_MB_PER_MIN))
        return [*lines, *lines_of(verdict)]

    @contextlib.asynccontextmanager
    async def _server(self, name: str) -> AsyncIterator[NatsServer]:
        (self._folder / name).mkdir(parents=True)
        server = NatsServer(self._folder / name / "nats", sync_interval="100ms")
        await server.start()
        try:
            yield server
        finally:
            await server.stop()

    @contextlib.asynccontextmanager
    async def _fleet(self, name: str, num_blocks: int = 1024) -> AsyncIterator[tuple[Fleet, list[Job]]]:
        if self._is_real:
            worker = {"num_threads": 1, "dtype": "float32", "context": 1024, "num_blocks": num_blocks}
            shape = Shape(MODEL, worker=worker, router={"ping_interval_s": 0.5})
        else:
            shape = script.shape(STEP_S)
        async with self._server(name) as server, Fleet.of(server, self._folder / name, shape) as fleet:
            jobs: list[Job] = (
                await uninterrupted(fleet.urls, 64) if self._is_real else script.echo_jobs((20, 400), self._seed)
            )
            yield fleet, jobs


class Leavers:
    """Clients that go away after a random time, streaming or not."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._chance = random.Random(seed)
        self._left_at: dict[str, float] = {}
        self.num_left = 0
        self.overruns_s: list[float] = []
        """From when a client left to the last token that was made for it."""

    async def leave(self, count: int) -> None:
        numbers: Iterator[int] = iter(range(count))
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, limits=httpx.Limits(max_connections=None)) as http:

            async def client() -> None:
                for number in numbers:
                    await self._one(http, number)

            await asyncio.gather(*(client() for _ in range(NUM_LEAVERS)))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        body = body_of(TEXT, {"echo": f"{number:08x}"}, number % 4 > 0, model=script.MODEL, max_tokens=4000)
        request = http.build_request("POST", self._fleet.urls[0] + TEXT, json=body)
        request_id = ""
        with contextlib.suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(self._chance.expovariate(4.0)):
                reply = await http.send(request, stream=True)
                try:
                    request_id = reply.headers.get("x-request-id", "")
                    async for _ in reply.aiter_lines():
                        pass
                finally:
                    await reply.aclose()
        self.num_left += 1
        if request_id:
            self._left_at[request_id] = time.monotonic()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Notes for each client that left when the last token was made for it."""
        last_at: dict[str, float] = {}

        def on_tokens(message: Message) -> None:
            last_at[message.subject.rpartition(".")[2]] = time.monotonic()

        bus = await NatsBus.connect(self._fleet.server.url, name="watcher", on_closed=lambda: None)
        self._left_at.clear()
        try:
            await bus.subscribe("tokens.>", on_tokens)
            yield
            await asyncio.sleep(2.0)
        finally:
            await bus.close()
        known = {name.rpartition("-")[2]: at for name, at in self._left_at.items()}
        self.overruns_s = [max(0.0, last_at[name] - at) for name, at in known.items() if name in last_at]


async def footprint(fleet: Fleet) -> dict[str, float]:
    """Files, tasks, subscriptions and blocks of an idle fleet."""
    found: dict[str, float] = {}
    for kind in ("router", "scheduler", "worker"):
        for place in fleet.places(kind):
            found[f"files of {place}"] = psutil.Process(fleet.pid_of(place)).num_fds()
    async with httpx.AsyncClient(trust_env=False) as http:
        for url in fleet.urls:
            for line in (await http.get(f"{url}/metrics")).text.splitlines():
                if line.startswith("headrace_asyncio_tasks "):
                    found["tasks of the router"] = float(line.split()[1])
        monitor = f"{fleet.server.monitor_url}/subsz"
        found["subscriptions at the broker"] = float((await http.get(monitor)).json()["num_subscriptions"])
    for place in fleet.places("worker"):
        found[f"free blocks of {place}"] = fleet.client.gauge(fleet.id_of(place), "num_free_blocks") or 0.0
    return found


def slope_of(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line; 0 without at least two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def lines_of(verdict: Verdict, max_stall_s: float = MAX_STALL_S) -> list[Line]:
    return [
        Line("answers", str(verdict.num_calls), verdict.num_calls > 0),
        Line("lost", str(verdict.num_lost), verdict.num_lost == 0),
        Line("truncated", str(verdict.num_truncated), verdict.num_truncated == 0),
        Line("other than uninterrupted", str(verdict.num_wrong), verdict.num_wrong == 0),
        Line("cut without an error", str(verdict.num_clean_cuts), True),
        Line("reconnections", str(verdict.num_reconnections), True),
        Line("longest stall of an answer, p99", f"{verdict.stall_p99_s:.1f} s", verdict.stall_p99_s <= max_stall_s),
        Line("longest stall of all", f"{verdict.stall_max_s:.1f} s", True),
        *(Line("", problem[:160], False) for problem in verdict.problems[:5]),
    ]
