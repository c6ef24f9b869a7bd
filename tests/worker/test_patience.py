"""How long an iteration may take."""

from headrace_worker.patience import FACTOR, MAX_LIMIT_S, NUM_REMEMBERED, Patience


def test_a_fast_engine_has_the_time_that_is_set() -> None:
    patience = Patience(8.0)
    assert patience.limit_s == 8.0
    for _ in range(10):
        patience.note(0.05)
    assert patience.limit_s == 8.0


def test_a_slow_engine_has_several_times_what_it_took() -> None:
    patience = Patience(8.0)
    patience.note(12.0)
    assert patience.limit_s == 12.0 * FACTOR
    for _ in range(NUM_REMEMBERED):
        patience.note(0.1)
    assert patience.limit_s == 8.0, "what it took long ago, or while it warmed up, says nothing"


def test_patience_has_an_end() -> None:
    patience = Patience(8.0)
    patience.note(1e6)
    assert patience.limit_s == MAX_LIMIT_S
