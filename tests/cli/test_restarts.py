from headrace_cli.restarts import MAX_DELAY_S, MAX_SHORT_LIVES, STABLE_LIFE_S, is_stable, next_delay


def test_delays_grow_up_to_a_bound() -> None:
    delays = [next_delay(number) for number in range(MAX_SHORT_LIVES)]
    known = [delay for delay in delays if delay is not None]
    assert known == sorted(known) and len(known) == MAX_SHORT_LIVES
    assert 0 < known[0] <= 1 and known[-1] <= MAX_DELAY_S


def test_a_crash_loop_ends_unless_it_serves_in_between() -> None:
    assert next_delay(MAX_SHORT_LIVES) is None
    assert next_delay(MAX_SHORT_LIVES, has_served=True) is not None
    assert next_delay(2000, has_served=True) == MAX_DELAY_S


def test_stable_is_ready_and_old() -> None:
    assert is_stable(STABLE_LIFE_S, was_ready=True)
    assert not is_stable(STABLE_LIFE_S, was_ready=False)
    assert not is_stable(STABLE_LIFE_S - 1, was_ready=True)
