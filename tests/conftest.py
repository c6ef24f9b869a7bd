"""A fresh nats-server for each test that asks for one."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from headrace_shared.broker import NatsServer

# Before anything loads torch: its threads must not spin while the services under test need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Its first text in a fresh clone takes seconds, and so may anything on a machine that others use as well.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", sync_interval="100ms")
    await server.start()
    yield server
    await server.stop()
