"""A closed-loop streaming client that costs little, since it shares the machine with what it measures.

HTTP/1.1 by hand over asyncio streams: one connection a request, one timestamp a chunk.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from benchmarks.workload import Job


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

    async def one_client() -> None:
        for job in waiting:
            await asyncio.sleep(job.pause_s)
            timings.append(await _request(host, port, model, job))

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


async def _request(host: str, port: int, model: str, job: Job) -> Timing:
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
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    timing = Timing()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {await reader.read()!r}")
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                timing.complete = True
                break
            if line.startswith(b"data: "):
                timing.tokens.append(time.perf_counter() - started)
    finally:
        writer.close()
    return timing
