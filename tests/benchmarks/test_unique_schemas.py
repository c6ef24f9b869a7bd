"""Schemas that nobody has sent before leave nothing behind, in the router or in the worker."""

import pytest

from benchmarks.unique_schemas import FLAT_MIB, NUM_SHOWN, Course, Use, in_the_router, in_the_worker

MOST_GROWTH_MIB = 24
"""Each is some hundred kilobytes when compiled: without a bound it would be several times as much."""


def check(course: Course) -> None:
    assert len(course.told) == NUM_SHOWN
    for then, last in zip(course.told[2], course.told[-1], strict=True):
        assert last.memory_mib - then.memory_mib < MOST_GROWTH_MIB, course.told
        assert last.written_mib - then.written_mib < 1.0, course.told


async def test_the_router_s_memory_is_flat() -> None:
    check(await in_the_router(1000))


def test_the_worker_s_memory_is_flat() -> None:
    check(in_the_worker(1000))


@pytest.mark.parametrize(
    ("last", "is_flat"),
    [
        (Use(100.0 + FLAT_MIB, 5.0), True),
        (Use(90.0, 5.0), True),
        (Use(101.0 + FLAT_MIB, 5.0), False),
        (Use(100.0, 6.0 + FLAT_MIB), False),
    ],
)
def test_what_grows_is_told(last: Use, is_flat: bool) -> None:
    course = Course(100, "one", "other")
    course.told = [(Use(100.0, 5.0), Use(1.0, 0.0)), (last, Use(1.0, 0.0))]
    assert course.is_flat is is_flat
