import os
from collections.abc import Iterator

import pytest

from tests.docker.base_images import ensure_base_images
from tests.docker.engine import build_environment, compose_command, running_engine, why_unavailable
from tests.docker.stack import Stack


@pytest.fixture(scope="session")
def engine() -> Iterator[None]:
    """A Docker engine with the base images."""
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the Docker tests: {reason}")
        pytest.skip(reason)
    with running_engine():
        ensure_base_images()
        yield


@pytest.fixture(scope="session")
def stack(engine: None) -> Iterator[Stack]:
    """The whole system, built and healthy, one container a service."""
    stack = Stack(compose_command(), build_environment())
    stack.down()
    stack.build()
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
