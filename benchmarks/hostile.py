"""Sixteen greedy streams, alone and beside every kind of hostile request.

    python -m benchmarks.hostile --minutes 5 [--rate 20] [--sim]

The real model in deterministic mode (with --sim: workers that take a GPU's time). Phases without and with attacks take
turns, so that a change of the machine's speed meets both. Prints one JSON object: whether every stream got the tokens
that it gets alone, the streams' inter-token times, and what the attacks were answered. Exit code 1 if a token differs,
an attack was answered with a 5xx other than 503, a process has died, or the 99th percentile has grown by more than a
fifth.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.client import percentile
from benchmarks.workload import english
from tests.e2e.api import MODEL
from tests.e2e.attacks import ATTACKS, Attacker, attack
from tests.e2e.launcher import Launched, launched
from tests.e2e.test_hostile_load import lasting

NUM_STREAMS = 16
NUM_TOKENS = 64
PHASE_S = 20.0
MAX_ATTACKS = 32
"""At a time."""
MOST_GROWTH = 1.2


class Streams:
    """The normal load: each stream asks the same again and again."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        self._client = httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False, limits=limits)
        text = english()
        self._prompts = [f"{number}. {text[9000 * number : 9000 * number + 300]}" for number in range(NUM_STREAMS)]
        self.alone: list[str] = []
        self.num_different = 0
        self.num_answers = 0

    async def ask(self, number: int, gaps: list[float]) -> str:
        body = {"model": MODEL, "prompt": self._prompts[number], "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True}
        said, last = "", 0.0
        async with self._client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
                    said += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return said

    async def learn(self) -> None:
        """What each gets alone."""
        self.alone = [await self.ask(number, []) for number in range(NUM_STREAMS)]

    async def run(self, seconds: float) -> list[float]:
        """Inter-token times."""
        gaps: list[float] = []
        ends_at = time.monotonic() + seconds

        async def repeat(number: int) -> None:
            while time.monotonic() < ends_at:
                said = await self.ask(number, gaps)
                self.num_answers += 1
                self.num_different += said != self.alone[number]

        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(repeat(number))
        return gaps

    async def close(self) -> None:
        await self._client.aclose()


async def attacks(url: str, port: int, rate: float, random: Random, answers: dict[str, Counter[int]]) -> None:
    """Until cancelled: all kinds in turn, so many a second."""
    running: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
        attacker = Attacker(client, port, random)

        async def one(kind: str) -> None:
            answers.setdefault(kind, Counter())[await attack(attacker, kind)] += 1

        try:
            while True:
                for kind in ATTACKS:
                    await asyncio.sleep(random.expovariate(rate))
                    if len(running) < MAX_ATTACKS:
                        task = asyncio.create_task(one(kind))
                        running.add(task)
                        task.add_done_callback(running.discard)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def measure(system: Launched, minutes: float, rate: float, seed: int) -> dict[str, Any]:
    pids = lasting(system)
    streams, random = Streams(system.url), Random(seed)
    answers: dict[str, Counter[int]] = {}
    quiet: list[float] = []
    hostile: list[float] = []
    await streams.learn()
    await streams.run(5.0)
    for _ in range(max(1, round(60.0 * minutes / PHASE_S))):
        quiet += await streams.run(PHASE_S)
        attacking = asyncio.create_task(attacks(system.url, system.port, rate, random, answers))
        hostile += await streams.run(PHASE_S)
        attacking.cancel()
        with suppress(asyncio.CancelledError):
            await attacking
    await streams.close()
    failures = sum(count for told in answers.values() for status, count in told.items() if status in (500, 502, 504))
    times = {
        name: {f"p{percent}_ms": round(1000 * percentile(gaps, percent), 2) for percent in (50, 99)}
        for name, gaps in (("quiet", quiet), ("hostile", hostile))
    }
    ratio = times["hostile"]["p99_ms"] / times["quiet"]["p99_ms"]
    has_all = pids == lasting(system)
    return {
        "answers": streams.num_answers,
        "different": streams.num_different,
        "inter_token": times,
        "p99_ratio": round(ratio, 3),
        "attacks": sum(told.total() for told in answers.values()),
        "statuses": {kind: dict(sorted(told.items())) for kind, told in answers.items()},
        "server_errors": failures,
        "processes_lived": has_all,
        "holds": not streams.num_different and not failures and has_all and ratio <= MOST_GROWTH,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="with attacks; as long again without")
    parser.add_argument("--rate", type=float, default=20.0, help="attacks a second")
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    environment = {} if options.sim else {"HEADRACE_DETERMINISTIC": "true"}
    shape = ["--no-autoscaler", *(["--sim", "--gpu", "l4", "--gpu-model", "llama-3.1-8b"] if options.sim else [])]
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), *shape, environment=environment) as system:
        result = asyncio.run(measure(system, options.minutes, options.rate, options.seed))
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
