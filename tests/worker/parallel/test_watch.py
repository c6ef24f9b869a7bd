"""When a group of ranks is given up, and which loss is named."""

from headrace_worker.engine_frames import Beat
from headrace_worker.parallel.watch import RankLoss, RankWatch, explain


def beat(*, is_serving: bool = True, is_busy: bool = False, num_steps: int = 0) -> Beat:
    return Beat(is_serving=is_serving, is_busy=is_busy, num_steps=num_steps, memory_bytes=10, device_bytes=20)


def run(watch: RankWatch, until: float, beats: dict[int, Beat], since: float = 0.0) -> tuple[float, str | None]:
    """Checks four times a second; the ranks in `beats` tell the same twice a second. When and why it gave up."""
    quarters = range(round(4 * since) + 1, round(4 * until) + 1)
    for quarter in quarters:
        now = quarter / 4
        for rank, what in beats.items():
            if quarter % 2 == 0:
                watch.on_beat(rank, what, now)
        if (problem := watch.check(now)) is not None:
            return now, problem
    return until, None


def test_idle_ranks_are_well_for_ever() -> None:
    watch = RankWatch([0, 1], 10.0, 0.0)
    assert run(watch, 100.0, {0: beat(), 1: beat()})[1] is None


def test_a_silent_rank_is_given_up_before_the_time_is_over_and_named() -> None:
    watch = RankWatch([2, 3], 10.0, 0.0)
    assert run(watch, 10.0, {2: beat(), 3: beat()})[1] is None
    seconds, problem = run(watch, 30.0, {2: beat()}, since=10.0)
    assert problem is not None and problem.startswith("rank 3 has given no sign of life")
    assert 16.5 < seconds <= 17.5


def test_a_rank_that_loads_may_be_silent_for_longer() -> None:
    watch = RankWatch([0], 10.0, 0.0)
    watch.on_beat(0, beat(is_serving=False), 0.0)
    assert run(watch, 59.0, {})[1] is None
    assert run(watch, 62.0, {}, since=59.0)[1] is not None


def test_ranks_that_are_busy_without_getting_on_are_given_up_before_the_time_is_over() -> None:
    watch = RankWatch([0, 1], 10.0, 0.0)
    seconds, problem = run(watch, 30.0, {0: beat(is_busy=True, num_steps=7), 1: beat()})
    assert problem is not None and problem.startswith("rank 0 did not get on")
    assert 8.0 < seconds < 9.5


def test_ranks_that_are_busy_and_get_on_are_well() -> None:
    watch = RankWatch([0], 10.0, 0.0)
    for second in range(1, 60):
        watch.on_beat(0, beat(is_busy=True, num_steps=second // 7), float(second))
        assert watch.check(float(second)) is None


def test_a_supervisor_that_was_frozen_blames_nobody_for_it() -> None:
    watch = RankWatch([0], 10.0, 0.0)
    assert run(watch, 5.0, {0: beat(is_busy=True)})[1] is None
    assert watch.check(65.0) is None
    assert watch.check(65.25) is None
    assert run(watch, 75.0, {}, since=65.25)[1] is not None


def test_a_rank_without_a_core_costs_none_its_time() -> None:
    """One is starved, and the others wait for it."""
    watch = RankWatch([0, 1], 10.0, 0.0)
    busy = beat(is_busy=True, num_steps=7)
    assert not watch.is_late(0.5)
    now = 0.0
    while now < 30.0:
        now += 0.25
        watch.on_beat(0, busy, now)
        if watch.is_late(now):
            watch.excuse(0.2)
        assert watch.check(now) is None
    assert watch.is_late(now)
    assert run(watch, 60.0, {0: busy}, since=now)[1] is not None


def test_memory_of_each_rank_is_as_it_told_last() -> None:
    watch = RankWatch([4, 5], 10.0, 0.0)
    watch.on_beat(5, beat(), 1.0)
    assert watch.memory() == {5: (10, 20)}


def test_a_killed_rank_explains_failures_that_were_heard_before() -> None:
    failed = RankLoss(0, None, "RuntimeError: Connection closed by peer", False)
    lost = RankLoss(2, None, "rank 0 closed its connection", True)
    killed = RankLoss(1, -9, None, False)
    assert explain([failed, lost, killed]) == "rank 1 was killed by signal 9"


def test_the_first_failure_explains_the_others() -> None:
    lost = RankLoss(0, None, "rank 1 closed its connection", True)
    first = RankLoss(1, None, "ValueError: boom", False)
    second = RankLoss(2, 7, None, False)
    assert explain([lost, first, second]) == "rank 1 failed: ValueError: boom"
    assert explain([second]) == "rank 2 ended with exit code 7"
