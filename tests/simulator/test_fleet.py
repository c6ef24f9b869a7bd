from headrace_simulator.fleet import Counts, Times, VirtualFleet

TIMES = Times(cold_start_s=90, promotion_s=1, drain_s=10)


def fleet(max_workers: int = 20, num_ready: int = 4) -> VirtualFleet:
    return VirtualFleet(TIMES, max_workers, num_ready)


def test_a_new_worker_is_ready_after_a_cold_start() -> None:
    made = fleet()
    made.apply(6, 0, 0.0)
    made.advance(89.0)
    assert made.counts == Counts(4, 2, 0, 0, 0)
    made.advance(90.0)
    assert made.counts == Counts(6, 0, 0, 0, 0)
    assert made.num_cold_starts == 2 and made.worker_s == 6 * 90


def test_parked_workers_are_promoted_first_and_replaced() -> None:
    made = fleet()
    made.apply(4, 3, 0.0)
    made.advance(90.0)
    assert made.counts == Counts(4, 0, 3, 0, 0)
    made.apply(6, 3, 90.0)
    assert made.counts == Counts(4, 2, 1, 2, 0) and made.num_promotions == 2
    made.advance(91.0)
    assert made.counts.ready == 6


def test_what_loads_for_the_pool_serves_instead_when_it_must() -> None:
    made = fleet()
    made.apply(4, 2, 0.0)
    made.apply(6, 0, 60.0)
    assert made.counts == Counts(4, 2, 0, 0, 0) and made.num_cold_starts == 2
    made.advance(90.0)
    assert made.counts.ready == 6


def test_a_worker_that_goes_is_paid_for_until_its_gpu_is_free() -> None:
    made = fleet()
    made.apply(3, 0, 0.0)
    assert made.counts == Counts(3, 0, 0, 0, 1)
    made.advance(9.0)
    assert made.counts.total == 4
    made.advance(10.0)
    assert made.counts.total == 3 and made.worker_s == 40


def test_a_worker_that_goes_is_kept_where_the_pool_has_need() -> None:
    made = fleet()
    made.apply(2, 1, 0.0)
    assert made.counts == Counts(2, 0, 0, 1, 1)
    made.advance(10.0)
    assert made.counts == Counts(2, 0, 1, 0, 0) and made.num_cold_starts == 0


def test_what_is_not_ready_yet_goes_first() -> None:
    made = fleet()
    made.apply(8, 0, 0.0)
    made.apply(5, 0, 5.0)
    assert made.counts == Counts(4, 1, 0, 0, 0)


def test_there_are_never_more_workers_than_gpus() -> None:
    made = fleet(max_workers=6)
    made.apply(50, 50, 0.0)
    assert made.counts.total == 6
    made.advance(90.0)
    made.apply(0, 6, 90.0)
    assert made.counts.total == 6
