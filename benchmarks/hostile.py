"""Sixteen greedy streams, alone and beside every kind of hostile request.

    python -m benchmarks.hostile --minutes 5 [--rate 20] [--sim] [--kind "too long" ...]

The real model in deterministic mode (with --sim: workers that take a GPU's time). Phases without and with attacks take
turns, so that a change of the machine's speed meets both. What is compared must be the same but for the attacks:

- The streams are out of step in both. Streams that begin together stay together while nobody disturbs them, and their
  prompts then fall into the few iterations in which nobody waits for a next token; among others' requests they drift
  apart, and each one's new prompt is in the others' iterations. So each begins with an answer of another length.
  After a stream's first answer its prompt is cached but for a few tokens: what grows is not the streams' own prompts.
- The attackers are one process from before the first phase until after the last, which has read its modules, and
  written its bodies, before it counts; on this machine it gets only what others leave of the cores, since in truth it
  has its own. It makes up for what it was late: `attacks_a_second` tells whether they came at the rate that was asked.

Prints one JSON object: whether every stream got the tokens that it gets alone, the streams' inter-token times, and what
the attacks were answered. Exit code 1 if a token differs, an attack was answered with a 5xx other than 503, a process
has died, fewer than nine tenths of the attacks were made, or the 99th percentile has grown by more than a fifth.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.attackers import Attackers
from benchmarks.client import percentile
from benchmarks.workload import english
from tests.e2e.api import MODEL
from tests.e2e.attacks import ATTACKS, lasting
from tests.e2e.launcher import Launched, launched

NUM_STREAMS = 16
NUM_TOKENS = 64
PHASE_S = 20.0
MOST_GROWTH = 1.2
LEAST_SHARE = 0.9
"""Of the attacks that are to be made."""
SETTLE_S = 1.0
"""For what attacks had begun."""


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

    async def ask(self, number: int, gaps: list[float], num_tokens: int = NUM_TOKENS) -> str:
        body = {"model": MODEL, "prompt": self._prompts[number], "max_tokens": num_tokens, "temperature": 0}
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
            said = await self.ask(number, gaps, NUM_TOKENS * (number + 1) // NUM_STREAMS)
            self.num_different += not self.alone[number].startswith(said.rstrip("\ufffd"))
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


async def measure(system: Launched, minutes: float, rate: float, seed: int, kinds: Sequence[str]) -> dict[str, Any]:
    pids = lasting(system)
    streams = Streams(system.url)
    quiet: list[float] = []
    hostile: list[float] = []
    num_phases = max(1, round(60.0 * minutes / PHASE_S))
    attacked_s = 0.0
    with Attackers(system.url, system.port, rate, seed, kinds) as attackers:
        await streams.learn()
        await streams.run(5.0)
        for _ in range(num_phases):
            quiet += await streams.run(PHASE_S)
            began_at = time.monotonic()
            with attackers.attacking():
                hostile += await streams.run(PHASE_S)
            attacked_s += time.monotonic() - began_at
            await asyncio.sleep(SETTLE_S)
        told = await asyncio.to_thread(attackers.end)
    await streams.close()
    answers = told.statuses
    attacks_a_second = (told.num_begun + told.num_left_out) / attacked_s
    failures = sum(count for each in answers.values() for status, count in each.items() if status in (500, 502, 504))
    times = {
        name: {f"p{percent}_ms": round(1000 * percentile(gaps, percent), 2) for percent in (50, 90, 99)}
        for name, gaps in (("quiet", quiet), ("hostile", hostile))
    }
    ratio = times["hostile"]["p99_ms"] / times["quiet"]["p99_ms"]
    has_all = pids == lasting(system)
    return {
        "answers": streams.num_answers,
        "different": streams.num_different,
        "inter_token": times,
        "p99_ratio": round(ratio, 3),
        "tokens": {"quiet": len(quiet), "hostile": len(hostile)},
        "attacks": told.num_begun,
        "attacks_left_out": told.num_left_out,
        "attacks_a_second": round(attacks_a_second, 2),
        "statuses": {kind: dict(sorted(each.items())) for kind, each in answers.items()},
        "server_errors": failures,
        "processes_lived": has_all,
        "holds": not streams.num_different
        and not failures
        and has_all
        and told.num_begun >= LEAST_SHARE * rate * attacked_s
        and ratio <= MOST_GROWTH,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="with attacks; as long again without")
    parser.add_argument("--rate", type=float, default=20.0, help="attacks a second")
    parser.add_argument("--sim", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=list(ATTACKS), help="of attack; by default all")
    options = parser.parse_args()
    kinds = options.kind or list(ATTACKS)
    environment = {} if options.sim else {"HEADRACE_DETERMINISTIC": "true"}
    shape = ["--no-autoscaler", *(["--sim", "--gpu", "l4", "--gpu-model", "llama-3.1-8b"] if options.sim else [])]
    with tempfile.TemporaryDirectory() as folder, launched(Path(folder), *shape, environment=environment) as system:
        result = asyncio.run(measure(system, options.minutes, options.rate, options.seed, kinds))
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
