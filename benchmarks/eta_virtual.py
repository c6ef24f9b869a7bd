"""The same as `benchmarks.eta` in virtual time: several routers that fill one queue, whatever else the machine does.

    python -m benchmarks.eta_virtual [--routers 1,2,4] [--seeds 5] [--seconds 120]

The routers' own queues, forecasts and corrections, a formula for the fleet, and milliseconds on the way between them.
Then, for each number of routers, five times as many clients as can be served, with a deadline of 20 s: how many of
those who come back when they were told to get in. Prints one JSON line for each load and number of routers.
"""

import argparse
import json
import random
import sys
from statistics import fmean, median

from benchmarks.eta import MIN_LEFT_S, arrivals
from tests.router.crowded_fleet import CrowdedFleet
from tests.router.queueing_fleet import NUM_PLACES, NUM_WORKERS, SPEED, QueueingFleet

MEAN_TOKENS = 48
CAPACITY = NUM_WORKERS * NUM_PLACES / (MEAN_TOKENS * SPEED.iteration_s(NUM_PLACES, 10))
"""Requests a second, about."""
LOADS = {"poisson": 0.95, "bursty": 0.8, "diurnal": 0.95}
"""Of capacity."""
BURST = 2 * NUM_WORKERS * NUM_PLACES
DEADLINE_S, CROWD, OBEDIENT = 20.0, 5.0, 0.3


def errors_of(kind: str, num_routers: int, seconds: float, seed: int) -> list[float]:
    """Relative ones of what was told while there was at least half a second left."""
    draw = random.Random(seed)
    fleet = QueueingFleet(num_routers)
    fleet.run(arrivals(kind, LOADS[kind] * CAPACITY, seconds, BURST, draw), draw)
    pairs = [(told.first_token_s, job.began_at - told.at) for job in fleet.jobs for told in job.told]
    return [(told_s - left_s) / left_s for told_s, left_s in pairs if left_s >= MIN_LEFT_S]


def crowd(num_routers: int, seconds: float, seed: int) -> tuple[float, float]:
    """The share of those who came back that got in, and the goodput as a share of what the fleet can do."""
    fleet = CrowdedFleet(num_routers, DEADLINE_S, random.Random(seed))
    fleet.crowd(CROWD * CAPACITY, OBEDIENT * CAPACITY, seconds)
    num_tokens = sum(job.num_tokens for job in fleet.jobs if job.began_at)
    return fleet.num_let_in_again / max(1, fleet.num_returned), num_tokens / (seconds * CAPACITY * MEAN_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default="1,2,4")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    for num_routers in map(int, options.routers.split(",")):
        for kind in LOADS:
            errors = [error for seed in seeds for error in errors_of(kind, num_routers, options.seconds, seed)]
            _print(
                load=kind,
                routers=num_routers,
                num_reports=len(errors),
                error_p50=median(map(abs, errors)),
                told_to_true_p50=1.0 + median(errors),
            )
        let_in, goodput = zip(*(crowd(num_routers, 2 * options.seconds, seed) for seed in seeds), strict=True)
        _print(load="crowd", routers=num_routers, came_back_admitted_share=fmean(let_in), goodput_share=fmean(goodput))


def _print(**figures: str | float) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
