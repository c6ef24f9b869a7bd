import itertools

from headrace_cli.restarts import MAX_DELAY_S, MAX_SHORT_LIVES, STABLE_LIFE_S, Restarts


def delays(*lives: tuple[float, bool], is_complete: bool = True) -> list[float | None]:
    """`lives`: how long each was, and whether it got ready."""
    restarts = Restarts()
    return [
        restarts.delay_after(lifetime_s, was_ready=was_ready, is_complete=is_complete)
        for lifetime_s, was_ready in lives
    ]


def test_delays_grow_up_to_a_bound() -> None:
    known = [delay for delay in delays(*[(1.0, True)] * 2000) if delay is not None]
    assert known == sorted(known) and len(known) == 2000
    assert 0 < known[0] <= 1 and known[-1] == MAX_DELAY_S


def test_a_crash_loop_ends_unless_it_serves_in_between() -> None:
    for life in ((1.0, False), (2 * STABLE_LIFE_S, False)):
        *known, last = delays(*[life] * MAX_SHORT_LIVES)
        assert last is None and None not in known
    assert delays(*[(1.0, True)] * MAX_SHORT_LIVES, is_complete=False)[-1] is None
    assert None not in delays(*[(1.0, True)] * 100)


def test_who_has_served_often_may_be_killed_before_it_does_again() -> None:
    assert None not in delays(*[(1.0, True), (0.5, False)] * 2 * MAX_SHORT_LIVES)


def test_a_life_that_proves_something_begins_the_count_anew() -> None:
    short = [(1.0, False)] * (MAX_SHORT_LIVES - 1)
    for lifetime_s, is_complete in itertools.product((STABLE_LIFE_S, STABLE_LIFE_S - 1), (True, False)):
        found = delays(*short, (lifetime_s, True), *short, is_complete=is_complete)
        assert (None in found) == (lifetime_s < STABLE_LIFE_S and not is_complete)


def test_a_stable_life_is_followed_by_a_quick_start() -> None:
    assert delays((1.0, True), (1.0, True), (STABLE_LIFE_S, True))[-1] == delays((1.0, True))[0]
