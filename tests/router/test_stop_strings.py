"""Stop strings are cut exactly, whatever the pieces, and nothing else is withheld."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include=include)
    shown = "".join(finder.push(piece) for piece in pieces)
    if finder.matched is None:
        shown += finder.release()
    return shown, finder.matched


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched"),
    [
        ("two three", ["t", "wo", " th", "ree"], "", "two three"),
        ("two three", ["t", "wo"], "two", None),
        ("ter time", ["win", "ter", " time"], "win", "ter time"),
        ("aab", ["a", "a", "a", "b"], "a", "aab"),
        ("\n\n", ["x\n", "y\n", "\nz"], "x\ny", "\n\n"),
    ],
)
def test_examples(stop: str, pieces: list[str], shown: str, matched: str | None) -> None:
    assert run([stop], pieces) == (shown, matched)


def test_include_shows_the_stop_string_and_nothing_after() -> None:
    assert run(["END"], ["abcE", "NDxyz"], include=True) == ("abcEND", "END")


def test_only_a_possible_beginning_is_held_back() -> None:
    finder = StopStrings(["stop", "toy"])
    assert finder.push("a st") == "a "
    assert finder.push("art sto") == "start "
    assert finder.push("y") == "s"  # "toy" is complete before "stop" can be
    assert finder.matched == "toy"


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


_TEXT = st.text("ab ", max_size=30)


@given(st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4), st.lists(_TEXT, max_size=8), st.booleans())
def test_any_cut_into_pieces_gives_the_same(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include=include) == reference(stops, "".join(pieces), include)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(_TEXT, max_size=8))
def test_what_is_held_back_could_begin_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    finder = StopStrings(stops)
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += finder.push(piece)
        if finder.matched is not None:
            return
        held = fed[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
