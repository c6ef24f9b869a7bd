"""How true the expected waits are that waiting clients are told.

    python -m benchmarks.eta [--seconds 120] [--loads poisson,bursty,diurnal] [--load 0.95]

Arrivals are Poisson; bursty: in groups of 2 × all places, with quiet between; diurnal: the rate swings between 0.4 and
1.8 times `load` of capacity, over half the run. Lengths vary by a factor of three. The error is |told − true| / true,
for every report that a client got while it waited (first ones apart as well), where it then waited for at least half a
second more. Prints one JSON line for each load.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.client import percentile
from benchmarks.overload import Load
from benchmarks.queue_client import Answer, ask
from benchmarks.simulated import add_arguments, simulated

MIN_LEFT_S = 0.5


def arrivals(kind: str, rate: float, seconds: float, burst: int, draw: random.Random) -> Iterator[float]:
    at = 0.0
    while at < seconds:
        if kind == "bursty":
            at += draw.expovariate(rate / burst)
            for _ in range(burst):
                yield at + draw.uniform(0.0, 0.5)
            continue
        now = rate * (1.1 + 0.7 * math.sin(4 * math.pi * at / seconds)) if kind == "diurnal" else rate
        at += draw.expovariate(now)
        yield at


async def measure(load: Load, kind: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    answers: list[Answer] = []
    draw = random.Random(options.seed)
    burst = 2 * options.workers * options.places
    began = time.perf_counter()

    async def one() -> None:
        answers.append(await ask("127.0.0.1", load.port(), load.body()))

    async with asyncio.TaskGroup() as group:
        for at in sorted(arrivals(kind, rate, options.seconds, burst, draw)):
            if at > options.seconds:
                break
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            group.create_task(one())
    errors: list[float] = []
    first_errors: list[float] = []
    ratios: list[float] = []
    num_backwards = 0
    for answer in answers:
        if answer.first_token_s is None:
            continue
        pairs = [(told.eta_s, answer.first_token_s - told.at_s) for told in answer.told if told.eta_s is not None]
        found = [abs(told - left) / left for told, left in pairs if left >= MIN_LEFT_S]
        ratios += [told / left for told, left in pairs if left >= MIN_LEFT_S]
        errors += found
        first_errors += found[:1]
        positions = [told.position for told in answer.told]
        num_backwards += sum(after > before for before, after in itertools.pairwise(positions))
    return {
        "load": kind,
        "num_requests": len(answers),
        "num_complete": sum(answer.is_complete for answer in answers),
        "num_waited": len(first_errors),
        "wait_p50_s": percentile([answer.first_token_s or 0.0 for answer in answers], 50),
        "wait_max_s": max(answer.first_token_s or 0.0 for answer in answers),
        "error_p50": percentile(errors, 50),
        "error_p90": percentile(errors, 90),
        "first_error_p50": percentile(first_errors, 50),
        "told_to_true_p50": percentile(ratios, 50),
        "num_reports": len(errors),
        "num_positions_risen": num_backwards,
    }


async def run(options: argparse.Namespace) -> None:
    with simulated(options) as system:
        load = Load([system.port + index for index in range(options.routers)], options)
        _, requests_per_s = await load.saturate(options.saturation_seconds)
        if not requests_per_s:
            raise SystemExit("no answer was complete in the time of saturation: --saturation-seconds, or --slowdown")
        for kind in options.loads.split(","):
            share = options.burst_load if kind == "bursty" else options.load
            result = await measure(load, kind, share * requests_per_s, options)
            rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}
            sys.stdout.write(json.dumps(rounded) + "\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--saturation-seconds", type=float, default=15.0)
    parser.add_argument("--loads", default="poisson,bursty,diurnal")
    parser.add_argument("--load", type=float, default=0.95, help="of capacity")
    parser.add_argument("--burst-load", type=float, default=0.8, help="of capacity, for bursty")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
