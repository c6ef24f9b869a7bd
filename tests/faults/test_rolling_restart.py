"""SIGTERM of every process under load: not one client notices, and all end within their time."""

import asyncio
from pathlib import Path

import httpx
import pytest

from headrace_shared.broker import NatsServer
from headrace_shared.tasks import end
from headrace_shared.telemetry import HEALTH_PORT
from tests.faults.crowd import Crowd
from tests.faults.fleet import KINDS, Fleet
from tests.faults.jobs import keep_busy
from tests.faults.script import echo_job, echo_jobs, shape
from tests.integration.deployment import status_of, until, until_empty

pytestmark = [pytest.mark.nats, pytest.mark.e2e]

DRAIN_S = 15.0
"""Longer than a plain client's answer, also when its worker is told to stop as well."""
MARGIN_S = 60.0
"""What a process may take beyond its drain time, on a busy machine."""
SHAPE = shape(
    0.04,
    worker={"drain_timeout_s": 1.0},
    scheduler={"drain_timeout_s": DRAIN_S},
    router={"drain_timeout_s": DRAIN_S, "drain_delay_s": 1.5},
)


async def watch_health(fleet: Fleet, place: str, seen: list[tuple[int, int]]) -> None:
    """Notes (/health, /live) as long as they are answered, for ever."""
    port = fleet.port_of(place) or int(fleet.client.telemetry[fleet.id_of(place)].gauges[HEALTH_PORT])
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        while True:
            health, live = await status_of(http, "/health"), await status_of(http, "/live")
            if health and live:
                seen.append((health, live))
            await asyncio.sleep(0.02)


async def restarted(fleet: Fleet, place: str) -> None:
    seen: list[tuple[int, int]] = []
    watch = asyncio.create_task(watch_health(fleet, place, seen))
    await until(lambda: seen, what="an answer")
    code, took_s = await fleet.stop(place)
    await end(watch)
    await fleet.start(place)
    assert code == 0 and took_s < DRAIN_S + MARGIN_S, (place, code, took_s)
    assert all(live == 200 for _, live in seen), (place, seen)
    if place.startswith("router"):  # the others may have given everything away in a moment
        assert 503 in [health for health, _ in seen], (place, seen)


async def test_a_rolling_restart_costs_nobody_anything(nats_server: NatsServer, tmp_path: Path) -> None:
    """Plain clients with short answers, and clients that come back with long ones: these outlast every drain time."""
    async with Fleet.of(nats_server, tmp_path, SHAPE) as fleet:
        stop = asyncio.Event()
        plain = Crowd(fleet.urls, seed=1, resumes=False)
        long = Crowd(fleet.urls, seed=2)
        crowds = [
            asyncio.create_task(keep_busy(plain, echo_jobs((5, 60)), 8, 1, stop)),
            asyncio.create_task(keep_busy(long, [echo_job("0123456789", 300)], 4, 2, stop)),
        ]
        await until(lambda: min(plain.num_events, long.num_events) > 50, what="answers")
        for number in (1, 2):  # one of each kind at a time
            places = [f"{kind}-{number}" for kind in KINDS]
            await asyncio.gather(*(restarted(fleet, place) for place in places))
            await fleet.until_ready(*places)
        stop.set()
        for verdict in await asyncio.gather(*crowds):
            assert (verdict.num_lost, verdict.num_truncated, verdict.num_wrong) == (0, 0, 0), verdict.problems
        assert not [refusal for call in plain.calls + long.calls for refusal in call.refusals]
        assert sum(call.num_connections - 1 for call in long.calls) > 0
        await until_empty(fleet.client)
    assert "Traceback" not in fleet.all_logs()
