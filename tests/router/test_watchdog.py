"""When a generation looks into the log, and when it gives up."""

from headrace_router.watchdog import LOOK_AFTER_S, LOOK_DELAYS_S, NEVER, Watchdog


def test_waiting_in_the_queue_is_no_stall() -> None:
    watchdog = Watchdog(100.0, request_timeout_s=50.0, stall_timeout_s=10.0)
    assert watchdog.next_alarm() == 150.0
    assert not watchdog.check(149.9) and not watchdog.is_stalled(149.9) and watchdog.look_at == NEVER
    assert watchdog.check(150.0)


def test_silence_is_looked_into_once_and_then_a_stall() -> None:
    watchdog = Watchdog(100.0, request_timeout_s=500.0, stall_timeout_s=10.0)
    watchdog.is_running = True
    watchdog.on_event(101.0)
    assert watchdog.next_alarm() == 101.0 + LOOK_AFTER_S
    assert not watchdog.check(105.9) and watchdog.look_at == NEVER
    assert not watchdog.check(106.0) and watchdog.look_at == 106.0
    assert not watchdog.check(111.5) and not watchdog.is_stalled(111.5), "not before the look"
    assert watchdog.on_look(111.6, found_all=True) and watchdog.look_at == NEVER
    assert watchdog.next_alarm() == 111.0
    assert not watchdog.check(111.6) and watchdog.is_stalled(111.6)
    watchdog.on_event(111.6)
    assert not watchdog.is_stalled(121.5) and watchdog.next_alarm() == 111.6 + LOOK_AFTER_S, "it begins anew"


def test_a_gap_is_looked_for_at_growing_intervals_and_not_for_ever() -> None:
    watchdog = Watchdog(0.0, request_timeout_s=500.0, stall_timeout_s=100.0)
    now = 10.0
    watchdog.on_gap(now)
    for number, delay_s in enumerate(LOOK_DELAYS_S, 1):
        assert watchdog.look_at == watchdog.next_alarm() == now + delay_s
        now = watchdog.look_at
        watchdog.on_gap(now)  # still there: changes nothing
        is_last = number == len(LOOK_DELAYS_S)
        assert watchdog.on_look(now, found_all=False) is not is_last
    watchdog.look_in(0.3, now)
    assert watchdog.on_look(now + 0.3, found_all=False), "counted anew"


def test_a_log_that_cannot_be_read_is_tried_again() -> None:
    watchdog = Watchdog(0.0, request_timeout_s=500.0, stall_timeout_s=100.0)
    watchdog.on_gap(1.0)
    watchdog.on_failed_look(2.0)
    assert watchdog.look_at == 2.0 + LOOK_DELAYS_S[-1]


def test_nothing_alarms_before_the_next_look_when_all_is_late_already() -> None:
    watchdog = Watchdog(0.0, request_timeout_s=500.0, stall_timeout_s=10.0)
    watchdog.is_running = True
    watchdog.on_gap(9.0)
    watchdog.on_failed_look(9.1)
    assert not watchdog.check(12.0) and not watchdog.is_stalled(12.0)
    assert watchdog.next_alarm() == watchdog.look_at == 9.1 + LOOK_DELAYS_S[-1]
