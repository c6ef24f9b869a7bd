"""One running system for the tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.e2e.launcher import Launched, launched


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """Two routers, two schedulers and two workers with the real model, context 1024."""
    environment = {"HEADRACE_CONTEXT": "1024", "HEADRACE_NUM_BLOCKS": "1024", "HEADRACE_NUM_THREADS": "1"}
    scale = ("--routers", "2", "--schedulers", "2", "--workers", "2")
    with launched(tmp_path_factory.mktemp("system"), *scale, environment=environment) as launched_system:
        yield launched_system
