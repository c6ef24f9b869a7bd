"""A tenant that floods, and one that does not: what the small one feels of it, in virtual time.

    python -m benchmarks.fairness [--seconds 60] [--rate 1.0] [--ratio 100] [--workers 2] [--schedulers 1]

Prints one JSON object: the small tenant's time to first token alone and beside `--ratio` times its load, which is more
than the workers can do, and the share of its answers that come in time. `fifo`: one queue for both, for comparison.
"""

import argparse
import json
import random
import sys

from benchmarks.virtual_fleet import Costs, VirtualFleet
from headrace_scheduler.decisions import WorkerFacts
from headrace_shared.quantiles import quantile

FACTS = WorkerFacts(num_blocks=4096, block_size=16, context=8192, max_sequences=64, tokens_per_iteration=2048)
PROMPT = 256
ANSWER = 200
WARM_UP_S = 5.0
SMALL, FLOOD = "small", "flood"


def run(options: argparse.Namespace, *, has_flood: bool, is_fair: bool = True) -> dict[str, float]:
    draw = random.Random(options.seed)
    fleet = VirtualFleet(options.schedulers, options.workers, FACTS, has_flows=is_fair)
    nonce = iter(range(1, 1 << 60))

    def send(tenant: str, rate: float, start: float) -> None:
        now = start
        while (now := now + draw.expovariate(rate)) < options.seconds:
            number = next(nonce)
            prompt = [number % 30_000, *(draw.randrange(30_000) for _ in range(PROMPT - 1))]
            fleet.send(now, tenant if is_fair else "", prompt, round(ANSWER * draw.uniform(0.5, 1.5)))

    if has_flood:
        send(FLOOD, options.rate * options.ratio, 0.0)
    num_flood = len(fleet.figures)
    send(SMALL, options.rate, WARM_UP_S)
    fleet.run(options.seconds + 30.0)
    small = list(fleet.figures.values())[num_flood:]
    waits = [figures.first_token_s for figures in small]
    told = [wait for wait in waits if wait is not None]
    complete = sum(len(figures.token_times) == figures.num_wanted for figures in small)
    flood = list(fleet.figures.values())[:num_flood]
    gauges = [node.core.gauges() for node in fleet.nodes]
    return {
        "requests": len(small),
        "ttft_p50_ms": round(1000 * quantile(told, 0.5), 1),
        "ttft_p99_ms": round(1000 * quantile(told, 0.99), 1),
        "complete": round(complete / len(small), 4),
        "flood_tokens_per_s": round(sum(len(figures.token_times) for figures in flood) / options.seconds, 1),
        "preempted": sum(each.num_preemptions for each in gauges),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1.0, help="the small tenant's requests a second")
    parser.add_argument("--ratio", type=float, default=100.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    alone = run(options, has_flood=False)
    beside = run(options, has_flood=True)
    fifo = run(options, has_flood=True, is_fair=False)
    costs = Costs()
    # The one that was under way when the request came: at most a full one.
    iteration_ms = 1000 * (
        costs.iteration_s + FACTS.max_sequences * costs.decode_s + FACTS.tokens_per_iteration * costs.prompt_token_s
    )
    bound = 1.5 * alone["ttft_p99_ms"] + iteration_ms
    result = {"alone": alone, "beside": beside, "fifo": fifo, "bound_ms": round(bound, 1)}
    result["p99_ratio"] = round(beside["ttft_p99_ms"] / alone["ttft_p99_ms"], 2)
    result["holds"] = beside["ttft_p99_ms"] <= bound and beside["complete"] >= 0.9 * alone["complete"]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
