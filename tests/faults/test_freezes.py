"""SIGSTOP of a worker, a scheduler and a router, and SIGCONT later: what slept does no harm when it wakes."""

import asyncio
from pathlib import Path

import pytest

from headrace_shared.broker import NatsServer
from tests.faults.crowd import Crowd
from tests.faults.fleet import KINDS, Fleet
from tests.faults.jobs import keep_busy
from tests.faults.script import echo_jobs, shape
from tests.integration.deployment import until_empty

pytestmark = [pytest.mark.nats, pytest.mark.e2e]

FROZEN_S = 4.0
"""Longer than a lease, and than a worker may be silent."""
SILENCE_S = 3.0
"""Routers send a comment every half second."""


async def test_whoever_sleeps_is_not_missed(nats_server: NatsServer, tmp_path: Path) -> None:
    async with Fleet.of(nats_server, tmp_path, shape()) as fleet:
        crowd, stop = Crowd(fleet.urls, seed=3, silence_s=SILENCE_S), asyncio.Event()
        busy = asyncio.create_task(keep_busy(crowd, echo_jobs((20, 150)), 8, 3, stop))
        await asyncio.sleep(0.5)
        sleepers = [fleet.places(kind)[-1] for kind in KINDS]  # one of each, all at once
        for place in sleepers:
            fleet.freeze(place)
        await asyncio.sleep(FROZEN_S)
        for place in sleepers:
            fleet.resume(place)
        await asyncio.sleep(1.0)
        stop.set()
        verdict = await busy
        assert (verdict.num_lost, verdict.num_truncated, verdict.num_wrong) == (0, 0, 0), verdict.problems
        assert verdict.num_reconnections > 0
        await until_empty(fleet.client)
