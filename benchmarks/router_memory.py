"""What the largest bodies cost a router: memory, and time during which it does nothing else.

    python -m benchmarks.router_memory [--kind "a text that is cut" ...] [--at-once 13] [--tokenizer tokenizer.json]

A router as a process of its own gets so many bodies of each kind at once; meanwhile it is asked for its health again
and again. Prints for each kind the highest resident size of the router and its helpers together and the one
afterwards, in MiB, the longest and the 99th percentile of those answers, in ms, and the statuses; first those of a
router that has nothing else to do. `--tokenizer`: a
model's, with the context `--context`, instead of a small one that makes a token of nearly every byte.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tokenizers import Tokenizer

from benchmarks.client import percentile
from headrace_shared.broker import NatsServer
from headrace_shared.fleet_messages import ModelCard
from tests.router.large_bodies import AT_ONCE, CARD, KINDS, MeasuredRouter, measured_router

MIB = 1 << 20


def card_of(tokenizer: Path | None, context: int) -> ModelCard:
    if tokenizer is None:
        return msgspec.structs.replace(CARD, context=context)
    content = tokenizer.read_bytes()
    size = Tokenizer.from_buffer(content).get_vocab_size()
    return msgspec.structs.replace(CARD, tokenizer=content, vocab_size=size, context=context)


def ask_for_health(has_begun: Event, over: Event, waits: "Queue[list[float]]", url: str) -> None:
    """A process."""
    found = []
    with httpx.Client(trust_env=False) as client:
        while not over.is_set():
            began_at = time.perf_counter()
            client.get(url + "/live")
            found.append(1000 * (time.perf_counter() - began_at))
            has_begun.set()
            time.sleep(0.005)
    waits.put(found)


@contextmanager
def probe(url: str) -> Iterator[list[float]]:
    """How long each answer took, once it is over."""
    context = multiprocessing.get_context("spawn")
    has_begun, over, answers = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=ask_for_health, args=(has_begun, over, answers, url))
    process.start()
    has_begun.wait(30.0)
    waits: list[float] = []
    try:
        yield waits
    finally:
        over.set()
        waits += answers.get(timeout=60.0)
        process.join(10.0)


async def measure(router: MeasuredRouter, kind: str, at_once: int) -> dict[str, Any]:
    path, make = KINDS[kind]
    body = make()
    router.forget_peaks()
    with probe(router.url) as waits:
        began_at = time.perf_counter()
        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
            told = await router.give(client, {f"{kind} {number}": (path, body) for number in range(at_once)})
        seconds = time.perf_counter() - began_at
    await asyncio.sleep(0.5)
    sizes = router.sizes()
    return {
        "kind": kind,
        "bytes": len(body),
        "peak_mib": sizes.peak // MIB,
        "after_mib": sizes.now // MIB,
        "wait_ms": {"p99": round(percentile(waits, 99), 1), "max": round(max(waits), 1)},
        "seconds": round(seconds, 2),
        "statuses": dict(Counter(told.values())),
    }


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsServer(folder / "nats", sync_interval="100ms")
        await server.start()
        try:
            card = card_of(options.tokenizer, options.context)
            async with measured_router(server, folder, card) as router:
                with probe(router.url) as waits:
                    await asyncio.sleep(3.0)
                idle = {"p99": round(percentile(waits, 99), 1), "max": round(max(waits), 1)}
                print(json.dumps({"before_mib": router.sizes().now // MIB, "wait_ms": idle}), flush=True)
                for kind in options.kind or KINDS:
                    print(json.dumps(await measure(router, kind, options.at_once)), flush=True)
        finally:
            await server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--context", type=int, default=CARD.context)
    asyncio.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
