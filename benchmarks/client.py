"""A closed-loop streaming client that costs little, since it shares the machine with what it measures.

The connections of `headrace flood`: each chunk is timed in the callback that brings it. Every request has a connection
of its own, since llama-server closes kept ones while the next request is on its way.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from benchmarks.workload import Job
from headrace_cli.flood.http_client import HttpClient, Target


@dataclass(slots=True)
class Timing:
    """Seconds. `tokens` holds the arrival time of each content chunk, relative to the request's start."""

    tokens: list[float] = field(default_factory=list)
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    num_requests: int
    num_complete: int
    tokens_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


async def run(host: str, port: int, model: str, jobs: Sequence[Job], concurrency: int) -> Summary:
    """Keeps `concurrency` requests running until all jobs are done."""
    waiting = iter(jobs)
    timings: list[Timing] = []
    target = Target(host, port, "", None)

    async def one_client() -> None:
        for job in waiting:
            await asyncio.sleep(job.pause_s)
            timings.append(await _request(target, model, job))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_client())
    return summarize(timings, sum(job.num_tokens for job in jobs), time.perf_counter() - started)


def summarize(timings: Sequence[Timing], num_tokens: int, elapsed_s: float) -> Summary:
    first = [timing.tokens[0] * 1e3 for timing in timings if timing.tokens]
    gaps = [(b - a) * 1e3 for timing in timings for a, b in zip(timing.tokens, timing.tokens[1:], strict=False)]
    return Summary(
        num_requests=len(timings),
        num_complete=sum(timing.complete for timing in timings),
        tokens_per_s=num_tokens / elapsed_s,
        ttft_mean_ms=fmean(first) if first else float("nan"),
        ttft_p50_ms=percentile(first, 50),
        ttft_p99_ms=percentile(first, 99),
        itl_p50_ms=percentile(gaps, 50),
        itl_p99_ms=percentile(gaps, 99),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """NaN without values."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def _request(target: Target, model: str, job: Job) -> Timing:
    body = json.dumps(
        {
            "model": model,
            "prompt": job.prompt_ids,
            "max_tokens": job.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    answer = _Answer()
    client = HttpClient(target, "")
    try:
        await client.send("POST", "/v1/completions", body, answer)
    finally:
        client.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.rest!r}")
    return answer.timing


class _Answer:
    """Hears one while it comes."""

    def __init__(self) -> None:
        self.timing = Timing()
        self.status = 0
        self.rest = b""
        """Of a line that is not complete."""
        self._started = time.perf_counter()

    def on_status(self, status: int, content_type: str) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        at = time.perf_counter() - self._started
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                self.timing.complete = True
            elif line.startswith(b"data: "):
                self.timing.tokens.append(at)
