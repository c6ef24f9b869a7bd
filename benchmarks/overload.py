"""What becomes of promises at ten times the load that the fleet can bear.

    python -m benchmarks.overload [--seconds 300] [--factor 10] [--deadline-s 20] [--obedient 0.3]

First saturation: as many clients as fill all places twice, in a closed loop. Then Poisson arrivals at `factor` times
the rate that was served, each with a deadline; `obedient` times that rate are clients that, when refused, come back
after Retry-After (once). Goodput counts tokens of answers that were complete within their deadline. Refusals are timed
to the status line, at the client, which runs on the same machine. Prints one JSON line.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import httpx

from benchmarks.client import percentile
from benchmarks.queue_client import Answer, ask
from benchmarks.simulated import MODEL, add_arguments, simulated

WARM_UP_S = 5.0


class Load:
    def __init__(self, ports: list[int], options: argparse.Namespace) -> None:
        self._ports = ports
        self._options = options
        self._draw = random.Random(options.seed)
        self._number = 0

    def body(self) -> dict[str, object]:
        mean = self._options.output_tokens
        prompt = [self._draw.randrange(1000, 40_000) for _ in range(self._options.prompt_tokens)]
        return {"model": MODEL, "prompt": prompt, "max_tokens": self._draw.randint(mean // 2, mean + mean // 2)}

    def port(self) -> int:
        self._number += 1
        return self._ports[self._number % len(self._ports)]

    async def saturate(self, seconds: float) -> tuple[float, float]:
        """Output tokens and requests per second of a fleet that always has something waiting."""
        num_clients = 2 * self._options.workers * self._options.places
        counted = Counter[str]()
        began = time.perf_counter() + WARM_UP_S
        until = began + seconds

        async def client() -> None:
            while time.perf_counter() < until:
                answer = await ask("127.0.0.1", self.port(), self.body())
                if began <= time.perf_counter() <= until:
                    counted["tokens"] += answer.num_tokens
                    counted["requests"] += 1

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return counted["tokens"] / seconds, counted["requests"] / seconds

    async def overload(self, rate: float, obedient_rate: float, seconds: float) -> dict[str, Any]:
        first: list[Answer] = []
        again: list[Answer] = []
        late: list[Answer] = []
        deadline_s = self._options.deadline_s
        done_at: list[tuple[float, int]] = []
        began = time.perf_counter()

        async def one(*, is_obedient: bool) -> None:
            body = self.body()
            answer = await ask("127.0.0.1", self.port(), body, deadline_s=deadline_s)
            first.append(answer)
            if answer.is_complete:
                done_at.append((time.perf_counter() - began, answer.num_tokens))
            if not is_obedient or answer.status not in (429, 503):
                return
            if time.perf_counter() - began + answer.retry_after_s > seconds:
                return  # by then the load is over: getting in would say nothing
            await asyncio.sleep(answer.retry_after_s)
            repeated = await ask("127.0.0.1", self.port(), body, deadline_s=deadline_s)
            again.append(repeated)
            if repeated.is_complete:
                done_at.append((time.perf_counter() - began, repeated.num_tokens))
            elif repeated.status == 200:
                late.append(repeated)

        async with asyncio.TaskGroup() as group:
            total = rate + obedient_rate
            at = 0.0
            while (at := at + self._draw.expovariate(total)) < seconds:
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                group.create_task(one(is_obedient=self._draw.random() < obedient_rate / total))
        admitted = [answer for answer in first + again if answer.status == 200]
        refused = [answer for answer in first + again if answer.status in (429, 503)]
        in_time = [answer for answer in admitted if answer.is_complete and answer.total_s <= deadline_s * 1.05]
        warm = min(WARM_UP_S, seconds / 4)
        goodput = sum(tokens for at, tokens in done_at if warm <= at <= seconds) / (seconds - warm)
        return {
            "goodput_tokens_per_s": goodput,
            "num_asked": len(first) + len(again),
            "num_admitted": len(admitted),
            "num_refused": len(refused),
            "in_time_share": len(in_time) / max(1, len(admitted)),
            "refusal_p50_ms": 1000 * percentile([answer.refused_in_s for answer in refused], 50),
            "refusal_p95_ms": 1000 * percentile([answer.refused_in_s for answer in refused], 95),
            "refusal_p99_ms": 1000 * percentile([answer.refused_in_s for answer in refused], 99),
            "retry_after_p50_s": percentile([answer.retry_after_s for answer in refused], 50),
            "retry_after_max_s": max((answer.retry_after_s for answer in refused), default=0.0),
            "num_came_back": len(again),
            "came_back_admitted_share": sum(answer.status == 200 for answer in again) / max(1, len(again)),
            "codes": dict(Counter(answer.code for answer in first + again if answer.code)),
            "others": sum(answer.status not in (200, 429, 503) for answer in first + again),
        }


async def watch_queue(url: str, seen: list[float]) -> None:
    """What is queued or running, by the first router's own count."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            text = (await client.get(f"{url}/metrics", timeout=10.0)).text
            rows = [row for row in text.splitlines() if row.startswith("headrace_requests_inflight ")]
            seen.append(float(rows[0].split()[1]) if rows else 0.0)
            await asyncio.sleep(1.0)


async def probe(url: str, took_ms: list[float]) -> None:
    """How long the router takes to say that it lives: what the machine itself adds to every refusal."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            began = time.perf_counter()
            await client.get(f"{url}/live", timeout=10.0)
            took_ms.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(0.1)


async def run(options: argparse.Namespace) -> None:
    with simulated(options, request_timeout_s=str(max(60.0, 2 * options.deadline_s))) as system:
        ports = [system.port + index for index in range(options.routers)]
        load = Load(ports, options)
        tokens_per_s, requests_per_s = await load.saturate(options.saturation_seconds)
        depths: list[float] = []
        probes: list[float] = []
        watching = asyncio.gather(watch_queue(system.url, depths), probe(system.url, probes))
        try:
            rate = options.factor * requests_per_s
            result = await load.overload(rate, options.obedient * requests_per_s, options.seconds)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    result = {
        "saturation_tokens_per_s": tokens_per_s,
        "saturation_requests_per_s": requests_per_s,
        "offered_requests_per_s": rate,
        "goodput_share": result["goodput_tokens_per_s"] / tokens_per_s,
        **result,
        "in_flight_max": max(depths, default=0.0),
        "live_p99_ms": percentile(probes, 99),
        "live_max_ms": max(probes, default=0.0),
    }
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--saturation-seconds", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--deadline-s", type=float, default=20.0)
    parser.add_argument("--obedient", type=float, default=0.3, help="share of capacity that obedient clients ask for")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
