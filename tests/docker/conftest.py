import os
import sys
from collections.abc import Iterator

import pytest

from tests.docker.base_images import ensure_base_images
from tests.docker.engine import Engine, build_environment, compose_command, running_engine, why_unavailable
from tests.docker.stack import Stack


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine with the base images."""
    reason = why_unavailable()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the Docker tests: {reason}")
        pytest.skip(reason)
    with running_engine() as engine:
        ensure_base_images()
        yield engine


@pytest.fixture(scope="session")
def stack(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The whole system, built and healthy, one container a service. After a failure its logs are shown."""
    stack = Stack(compose_command(), build_environment())
    stack.clear()
    stack.build()
    try:
        stack.up()
        num_failed = request.session.testsfailed
        yield stack
        if request.session.testsfailed > num_failed:
            sys.stdout.write(stack.compose("logs", "--tail", "40"))
    finally:
        stack.down()
