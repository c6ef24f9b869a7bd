"""Schemas that nobody has sent before leave nothing behind, in the router or in the worker."""

from benchmarks.unique_schemas import in_the_router, in_the_worker

MOST_GROWTH_MIB = 24
"""Each is some hundred kilobytes when compiled: without a bound it would be several times as much."""


async def test_the_router_s_memory_is_flat() -> None:
    told = await in_the_router(1000)
    (router, process), (router_then, process_then) = told[2], told[-1]
    assert router_then - router < MOST_GROWTH_MIB and process_then - process < MOST_GROWTH_MIB, told


def test_the_worker_s_memory_is_flat() -> None:
    told = in_the_worker(1000)
    assert told[-1] - told[2] < MOST_GROWTH_MIB, told
