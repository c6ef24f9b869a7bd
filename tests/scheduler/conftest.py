"""What tests of a scheduler's shell share."""

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.site import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for site in world.sites:
        await site.stop()
