"""How many threads compute few rows."""

from collections.abc import Callable
from itertools import pairwise

from headrace_worker.native.team_size import MOST_ROWS, OFTEN, SELDOM, TeamSize


def chosen(team_size: TeamSize, count: int, duration_s: Callable[[int], float], num_rows: int = 1) -> list[int]:
    """Of `count` iterations that take duration_s(number of threads)."""
    sizes = []
    for _ in range(count):
        size = team_size.choose(num_rows, 2)
        team_size.observe(num_rows, 2, size, duration_s(size))
        sizes.append(size)
    return sizes


def test_the_faster_number_is_kept_and_the_other_tried_ever_less() -> None:
    sizes = chosen(TeamSize(), 4 * SELDOM, lambda size: 2.0 / size)
    trials = [number for number, size in enumerate(sizes) if size == 1]
    assert trials[0] == OFTEN - 1
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps[0] == 2 * OFTEN and gaps[-1] == SELDOM and gaps == sorted(gaps)


def test_one_thread_fewer_is_used_where_that_is_faster_and_only_as_long() -> None:
    team_size = TeamSize()
    assert set(chosen(team_size, 10 * OFTEN, lambda size: size)[-OFTEN // 2 :]) == {1}
    assert chosen(team_size, 8 * SELDOM, lambda size: 2.0 / size)[-OFTEN:].count(2) >= OFTEN - 1


def test_a_single_slow_iteration_changes_little() -> None:
    team_size = TeamSize()
    chosen(team_size, 2 * OFTEN, lambda size: 2.0 / size)
    team_size.observe(1, 2, 2, 3.0)
    assert chosen(team_size, OFTEN // 2, lambda size: 2.0 / size) == [2] * (OFTEN // 2)


def test_many_rows_and_other_numbers_of_threads_are_left_alone() -> None:
    team_size = TeamSize()
    assert set(chosen(team_size, 4 * OFTEN, lambda size: size, num_rows=MOST_ROWS + 1)) == {2}
    for num_threads in (1, 3, 8):
        assert {team_size.choose(1, num_threads) for _ in range(4 * OFTEN)} == {num_threads}


def test_numbers_of_rows_are_measured_apart() -> None:
    team_size = TeamSize()
    chosen(team_size, 10 * OFTEN, lambda size: size, num_rows=1)
    assert team_size.choose(1, 2) == 1 and team_size.choose(8, 2) == 2
