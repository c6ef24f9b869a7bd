"""An engine that gets no core is not one that hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from headrace_worker.hang_watch import AWAY_S, TOLD_MARGIN_S, HangWatch
from headrace_worker.patience import MAX_LIMIT_S, Patience
from headrace_worker.starvation import Starvation, run_delays

TICK_S = 0.05


def hangs_after(delays: Callable[[float], dict[int, float]], limit_s: float = 8.0, until_s: float = 400.0) -> float:
    """Seconds without an iteration until it is taken for hanging. `delays`: of its threads, at a time."""
    now = 0.0
    watch = HangWatch(Patience(limit_s), Starvation(lambda: delays(now)), now)
    while now < until_s:
        now += TICK_S
        if watch.hangs(0.0, now):
            return now
    return now


def test_an_engine_whose_threads_wait_for_each_other_hangs_when_its_time_is_up() -> None:
    assert hangs_after(lambda now: {1: 3.0, 2: 5.0}) == pytest.approx(8.0, abs=0.1)


def test_where_the_system_does_not_tell_the_time_counts_as_it_passes() -> None:
    assert hangs_after(lambda now: {}) == pytest.approx(8.0, abs=0.1)


def test_time_without_a_core_does_not_count() -> None:
    """Half of it: what thread 1 waits for. Whatever another one waits for may be the same time."""
    assert hangs_after(lambda now: {1: now / 2, 2: now / 3}) == pytest.approx(15.5, abs=0.6)


def test_a_thread_that_has_just_begun_counts_from_its_beginning() -> None:
    assert hangs_after(lambda now: {1: 0.0} | ({int(now): now % 1.0} if now > 2.0 else {})) > 9.0


def test_it_has_an_end_all_the_same() -> None:
    assert hangs_after(lambda now: {1: 10 * now}) == pytest.approx(MAX_LIMIT_S, abs=0.1)


def test_a_time_for_which_this_process_was_not_run_is_nobody_elses_fault() -> None:
    watch = HangWatch(Patience(8.0), Starvation(dict), 0.0)
    now = 0.0
    while now < 5.0:
        now += TICK_S
        assert not watch.hangs(0.0, now)
    now += 20.0
    while not watch.hangs(0.0, now):
        now += TICK_S
    assert now == pytest.approx(28.0, abs=AWAY_S)


def test_the_next_iteration_has_its_own_time() -> None:
    now = 0.0
    watch = HangWatch(Patience(8.0), Starvation(lambda: {1: now}), now)
    while now < 20.0:
        now += TICK_S
        assert not watch.hangs(0.0, now)
    assert watch.limit_s > 20.0 and watch.told_limit_s == watch.limit_s + TOLD_MARGIN_S
    assert not watch.hangs(now, now)
    assert watch.limit_s == watch.told_limit_s == 8.0


def test_laps_are_as_long_as_the_time_between_them_at_most() -> None:
    delays = {1: 5.0}
    starvation = Starvation(lambda: dict(delays))
    assert starvation.lap(10.0) == 0.0
    delays[1] = 5.25
    assert starvation.lap(11.0) == 0.25
    delays[1] = 50.0
    assert starvation.lap(12.0) == 1.0
    del delays[1]
    assert starvation.lap(13.0) == 0.0
    starvation.reset()
    delays[1] = 99.0
    assert starvation.lap(14.0) == 0.0


@pytest.fixture
def rivals() -> Iterator[list[int]]:
    """Processes that want the same core all the time."""
    core = str(min(os.sched_getaffinity(0)))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(2)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(not run_delays([os.getpid()]), reason="the system does not count it")
def test_the_system_tells_who_waits_for_a_core(rivals: list[int]) -> None:
    deadline = time.monotonic() + 20.0
    while not all(run_delays([pid]) and sum(run_delays([pid]).values()) > 0.2 for pid in rivals):
        assert time.monotonic() < deadline, [run_delays([pid]) for pid in rivals]
        time.sleep(0.05)
    stopped = rivals[0]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.1)
    before = run_delays([stopped])
    time.sleep(0.3)
    assert run_delays([stopped]) == before, "a process that is stopped waits for no core"
    assert run_delays([2**30]) == {}, "there is no such process"
