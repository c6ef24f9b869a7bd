"""Whether the time to first token tells one tenant what another has asked.

    python -m benchmarks.side_channel [--number 1000] [--prompt-tokens 1000]

A victim sends a prompt; another tenant then sends the same one, and one that nobody has sent, in random order. Times to
first token of the two are compared with the two-sample test of Kolmogorov and Smirnov. As a control the victim does the
same with prompts of its own, which must differ. Workers take the time that a GPU would and compute nothing. Prints one
JSON object; exit code 1 if the tenants can be told apart, or the control cannot.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.e2e.launcher import Launched, launched

SYSTEM = ("--sim", "--gpu", "l4", "--gpu-model", "llama-3.2-1b", "--no-autoscaler")
SIGNIFICANT = 0.05
CONTROL_SHARE = 5
"""One prompt in so many is also a control."""


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """(largest distance of the two distributions, probability of one as large if they are the same). Asymptotic:
    Stephens, 1970."""
    values = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    counts, sizes = [0, 0], (len(first), len(second))
    distance = 0.0
    for position, (value, which) in enumerate(values):
        counts[which] += 1
        if position + 1 == len(values) or values[position + 1][0] != value:
            distance = max(distance, abs(counts[0] / sizes[0] - counts[1] / sizes[1]))
    root = math.sqrt(sizes[0] * sizes[1] / sum(sizes))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return distance, 1.0  # the series below converges too slowly, and differs from 1 by less than 1e-10
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, sum(terms)))


class Tenant:
    def __init__(self, system: Launched, name: str) -> None:
        command = [sys.executable, "-m", "headrace_cli", "keys", "create", "--name", name, "--json"]
        command += ["--data-dir", str(system.data_dir)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        headers = {"Authorization": f"Bearer {json.loads(made.stdout)['key']}"}
        self._client = httpx.Client(base_url=system.url, headers=headers, timeout=60.0, trust_env=False)

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """(seconds to the first token, prompt tokens that are said to be cached)."""
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        started_at, first_s = time.perf_counter(), 0.0
        usage: dict[str, Any] = {}
        with self._client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - started_at
                    usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
        return first_s, usage["prompt_tokens_details"]["cached_tokens"]


def measure(system: Launched, number: int, num_tokens: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    victim, other = Tenant(system, "victim"), Tenant(system, "other")

    def fresh() -> list[int]:
        return [draw.randrange(1000, 40_000) for _ in range(num_tokens)]

    asked: list[float] = []
    unasked: list[float] = []
    own: list[float] = []
    own_fresh: list[float] = []
    num_cached = 0
    for tenant in (victim, other):
        tenant.ask(fresh())
    for turn in range(number):
        prompt = fresh()
        victim.ask(prompt)
        for times, wanted in draw.sample([(asked, prompt), (unasked, fresh())], 2):
            elapsed_s, cached = other.ask(wanted)
            times.append(elapsed_s)
            num_cached += cached
        if turn % CONTROL_SHARE == 0:
            own.append(victim.ask(prompt)[0])
            own_fresh.append(victim.ask(fresh())[0])
    distance, p = kolmogorov_smirnov(asked, unasked)
    control_distance, control_p = kolmogorov_smirnov(own, own_fresh)
    return {
        "number": number,
        "ttft_of_what_another_tenant_has_asked_p50_ms": round(1000 * median(asked), 2),
        "ttft_of_what_nobody_has_asked_p50_ms": round(1000 * median(unasked), 2),
        "distance": round(distance, 4),
        "p": round(p, 4),
        "cached_tokens_told": num_cached,
        "control": {
            "own_again_p50_ms": round(1000 * median(own), 2),
            "own_fresh_p50_ms": round(1000 * median(own_fresh), 2),
            "distance": round(control_distance, 4),
            "p": control_p,
        },
        "holds": p > SIGNIFICANT and num_cached == 0 and control_p < 1e-6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), *SYSTEM) as system:
        result = measure(system, options.number, options.prompt_tokens, options.seed)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
