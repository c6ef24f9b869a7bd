"""When a smaller model answers."""

import pytest

from headrace_router.overflow import Overflow, parse_overflow
from headrace_shared.errors import ConfigError


def test_it_begins_above_one_wait_and_ends_below_another() -> None:
    overflow = Overflow({"large": "small"}, above_s=10.0, below_s=3.0)
    waits = [1.0, 9.0, 11.0, 9.0, 4.0, 2.0, 4.0, 9.0]
    assert [overflow.update("large", wait) for wait in waits] == [
        False, False, True, True, True, False, False, False,
    ]  # fmt: skip


def test_a_wait_that_is_not_known_changes_nothing() -> None:
    overflow = Overflow({"large": "small"}, above_s=10.0, below_s=3.0)
    assert not overflow.update("large", None)
    overflow.update("large", 20.0)
    assert overflow.update("large", None)


def test_models_without_a_smaller_one_never_overflow() -> None:
    overflow = Overflow({"large": "medium", "medium": "small"}, above_s=0.0, below_s=0.0)
    assert not overflow.update("other", 100.0)
    assert list(overflow.smaller("large")) == ["medium", "small"] and list(overflow.smaller("small")) == []


@pytest.mark.parametrize("pairs", [["a"], ["=b"], ["a="], ["a=b", "a=c"], ["a=a"], ["a=b", "b=c", "c=a"]])
def test_what_makes_no_sense_stops_the_start(pairs: list[str]) -> None:
    with pytest.raises(ConfigError, match="overflow"):
        parse_overflow(pairs)


def test_an_end_above_the_beginning_stops_the_start() -> None:
    """It would begin and end with every other call."""
    with pytest.raises(ConfigError, match="overflow_below_s"):
        Overflow({"large": "small"}, above_s=2.0, below_s=3.0)
    Overflow({}, above_s=2.0, below_s=3.0)


def test_pairs() -> None:
    assert parse_overflow(["large=small", " x/y = z "]) == {"large": "small", "x/y": "z"}
