"""A fresh nats-server for each test that asks for one, and the environment of all tests."""

import functools
import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from headrace_shared.broker import NatsServer
from tests.search_path import with_tests
from tests.sharing import Groups, arrange, end_systems

# Before anything loads torch: its threads must not spin while the services under test need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Each client would read the certificates of all authorities, for 25 ms of the processor's time, to reach this machine.
# Set by name, since httpx does not export what is replaced.
setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))  # noqa: B010
# Its first text in a fresh clone takes seconds, and so may anything on a machine that others use as well.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# Engines of tests are started by services, which search no folder that they happen to be started in.
os.environ["PYTHONPATH"] = with_tests(os.environ)
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    end_systems(item, nextitem)


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats", sync_interval="100ms")
    await server.start()
    yield server
    await server.stop()
