"""What is read off the queue and put together with what the fleet says."""

from headrace_autoscaler.fleet import Fleet
from headrace_autoscaler.gathering import Gathering
from headrace_autoscaler.rates import Arrivals
from headrace_autoscaler.reconcile import Counts
from headrace_shared.memory_bus import MemoryBus
from tests.autoscaler.bench import ask, prepare, take
from tests.autoscaler.heard import figures, hello

READY = Counts(ready=1)


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.bus = MemoryBus()
        self.fleet = Fleet()
        self.gathering = Gathering(self.bus, self.fleet, lambda: self.now)


def test_requests_that_came_are_counted_though_counters_start_anew() -> None:
    arrivals = Arrivals()
    for counted in (70, 75, 3, 4, 10):
        arrivals = arrivals.after(counted)
    assert arrivals.num == 5 + 0 + 1 + 6


async def test_what_waits_in_a_window_was_taken_and_does_not_run() -> None:
    bench = Bench()
    await prepare(bench.bus)
    await bench.gathering.observe("tiny", READY, 30.0)
    await ask(bench.bus, 10)
    for _ in range(6):
        await take(bench.bus)
    bench.fleet.on_telemetry(figures("scheduler", "s1", "tiny", num_waiting=2, oldest_wait_s=3.0), bench.now)
    seen = await bench.gathering.observe("tiny", READY, 30.0)
    assert (seen.num_waiting, seen.num_running, seen.num_arrived) == (6, 4, 10)
    assert seen.oldest_wait_s == 3.0 and seen.warm_up_s == 30.0


async def test_sequences_count_where_there_are_more_of_them_than_requests() -> None:
    bench = Bench()
    await prepare(bench.bus)
    await ask(bench.bus, 1)
    await take(bench.bus)
    bench.fleet.on_hello(hello("w1"), bench.now)
    bench.fleet.on_telemetry(figures("worker", "w1", num_running=5), bench.now)
    seen = await bench.gathering.observe("tiny", READY, 30.0)
    assert (seen.num_waiting, seen.num_running, seen.worker_capacity) == (0, 5, 8)


async def test_where_no_worker_is_everything_has_waited_since_it_was_first_seen() -> None:
    bench = Bench()
    await prepare(bench.bus)
    await ask(bench.bus, 1)
    assert (await bench.gathering.observe("tiny", Counts(), 30.0)).oldest_wait_s == 0.0
    bench.now += 7
    assert (await bench.gathering.observe("tiny", Counts(), 30.0)).oldest_wait_s == 7.0
    assert (await bench.gathering.observe("tiny", READY, 30.0)).oldest_wait_s == 0.0


async def test_calls_that_routers_hold_for_a_model_nobody_has_seen_are_work() -> None:
    bench = Bench()
    router = figures("router", "r1")
    router.gauges["wanted:tiny"] = 3.0
    bench.fleet.on_telemetry(router, bench.now)
    seen = await bench.gathering.observe("tiny", Counts(), 30.0)
    assert (seen.num_waiting, seen.num_running) == (3, 0)


async def test_a_queue_that_was_read_once_and_cannot_be_read_now_is_unknown() -> None:
    bench = Bench()
    assert (await bench.gathering.observe("tiny", READY, 30.0)).num_waiting == 0  # nobody has made it yet
    await prepare(bench.bus)
    assert (await bench.gathering.observe("tiny", READY, 30.0)).num_waiting == 0
    bench.bus.broker.stop()
    seen = await bench.gathering.observe("tiny", READY, 30.0)
    assert seen.num_waiting is None and seen.num_running is None and seen.num_ready == 1
