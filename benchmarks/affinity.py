"""Prompts that share beginnings, over several schedulers: how many of their tokens are found cached, in virtual time.

    python -m benchmarks.affinity [--seconds 60] [--rate 40] [--groups 96] [--schedulers 3] [--workers 6]

Prints one JSON object: the hit rate of one scheduler with all workers, of several that share them, and of several where
each takes from every queue, for comparison; and the median time to first token of each.
"""

import argparse
import json
import random
import sys

from benchmarks.virtual_fleet import VirtualFleet
from headrace_scheduler.decisions import WorkerFacts
from headrace_shared.quantiles import quantile

FACTS = WorkerFacts(num_blocks=2048, block_size=16, context=8192, max_sequences=64, tokens_per_iteration=2048)
PREFIX = 1024
SUFFIX = 96
ANSWER = 64
MODES = {"one": (1, True), "several": (0, True), "without affinity": (0, False)}


def run(options: argparse.Namespace, num_schedulers: int, *, has_affinity: bool) -> dict[str, float]:
    draw = random.Random(options.seed)
    fleet = VirtualFleet(num_schedulers, options.workers, FACTS, has_affinity=has_affinity)
    prefixes = [[draw.randrange(30_000) for _ in range(PREFIX)] for _ in range(options.groups)]
    weights = [1.0 / (rank + 1) ** options.skew for rank in range(options.groups)]
    now = 0.0
    while (now := now + draw.expovariate(options.rate)) < options.seconds:
        (prefix,) = draw.choices(prefixes, weights)
        fleet.send(now, "", [*prefix, *(draw.randrange(30_000) for _ in range(SUFFIX))], ANSWER)
    fleet.run(options.seconds + 30.0)
    waits = [wait for figures in fleet.figures.values() if (wait := figures.first_token_s) is not None]
    return {
        "hit_rate": round(fleet.hit_rate(), 4),
        "ttft_p50_ms": round(1000 * quantile(waits, 0.5), 1),
        "ttft_p99_ms": round(1000 * quantile(waits, 0.99), 1),
        "answered": round(len(waits) / len(fleet.figures), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--groups", type=int, default=96, help="different beginnings")
    parser.add_argument("--skew", type=float, default=0.8, help="exponent of their popularity (Zipf)")
    parser.add_argument("--schedulers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result: dict[str, object] = {}
    rates = {}
    for name, (number, has_affinity) in MODES.items():
        figures = run(options, number or options.schedulers, has_affinity=has_affinity)
        result[name] = figures
        rates[name] = figures["hit_rate"]
    result["ratio"] = round(rates["several"] / rates["one"], 4)
    result["holds"] = rates["several"] >= 0.9 * rates["one"]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
