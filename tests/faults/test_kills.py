"""kill -9 of workers, schedulers and routers in turn, under load with the real model: nobody can tell."""

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.subjects import DEAD
from tests.faults.crowd import Crowd
from tests.faults.disturbances import kill_in_turn
from tests.faults.fleet import KINDS, Fleet, Shape
from tests.faults.jobs import MODEL, keep_busy, uninterrupted
from tests.faults.script import echo_jobs, shape
from tests.integration.deployment import Client, until_empty

pytestmark = [pytest.mark.nats, pytest.mark.model, pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_CLIENTS = 12
NUM_KILLS = 14
WITHIN_S = 30.0
MAX_TOKENS = 32
MAX_STALL_S = 30.0
"""On a machine that the services share with tests and with models that load; benchmarks/faults.py holds it to five. A
slower one shows it while nothing is killed, too."""
SLOWER = 10.0
SHAPE = Shape(MODEL, worker={"num_threads": 1, "dtype": "float32", "context": 1024, "num_blocks": 1024})


async def test_kills_are_not_noticed(nats_server: NatsServer, tmp_path: Path) -> None:
    async with Fleet.of(nats_server, tmp_path, SHAPE) as fleet:
        jobs = await uninterrupted(fleet.urls, MAX_TOKENS)
        crowd, stop = Crowd(fleet.urls, seed=9), asyncio.Event()
        busy = asyncio.create_task(keep_busy(crowd, jobs, NUM_CLIENTS, 9, stop))
        killed = await kill_in_turn(fleet, NUM_KILLS, 9, (1.0, 2.5), WITHIN_S, num_each=2)
        stop.set()
        verdict = await busy
        assert min(killed[kind] for kind in KINDS) >= 2 and verdict.num_calls >= NUM_CLIENTS, (killed, verdict)
        assert (verdict.num_lost, verdict.num_truncated, verdict.num_wrong) == (0, 0, 0), verdict.problems
        assert verdict.num_clean_cuts == 0 and verdict.num_reconnections > 0
        undisturbed_s = max(job.stall_s for job in jobs)
        assert verdict.stall_p99_s < MAX_STALL_S + SLOWER * undisturbed_s, (undisturbed_s, verdict)
        async with Client.connect(nats_server.url, hears_tokens=False) as client:
            await until_empty(client)
    assert "Traceback" not in fleet.all_logs()


async def test_no_request_is_left_open_while_workers_come_and_go(nats_server: NatsServer, tmp_path: Path) -> None:
    """Short requests, and one of three workers is killed or told to stop every second or so."""
    fast = shape(0.02, workers=3, worker={"drain_timeout_s": 1.0})
    async with Fleet.of(nats_server, tmp_path, fast) as fleet:
        crowd, stop = Crowd(fleet.urls, seed=5, resumes=False), asyncio.Event()
        busy = asyncio.create_task(keep_busy(crowd, echo_jobs((1, 60)), NUM_CLIENTS, 5, stop))
        chance = random.Random(5)
        for number in range(10):
            await asyncio.sleep(chance.uniform(0.2, 0.8))
            ready = [place for place in fleet.places("worker") if await fleet.is_ready(place)]
            if ready:
                place = chance.choice(ready)
                await (fleet.kill(place) if number % 2 else fleet.restart(place))
        stop.set()
        verdict = await busy
        assert (verdict.num_lost, verdict.num_truncated, verdict.num_wrong) == (0, 0, 0), verdict.problems
        assert verdict.num_reconnections == 0
        await until_empty(fleet.client)
        assert await fleet.client.bus.num_messages(DEAD.name) == 0, "a kill is no engine's failure: nobody is suspected"
        for router in fleet.urls:
            async with httpx.AsyncClient(base_url=router, trust_env=False) as http:
                assert "headrace_requests_inflight 0.0" in (await http.get("/metrics")).text
