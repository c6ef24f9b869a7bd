"""What it costs that chat templates are rendered in a process of their own.

    python -m benchmarks.template_cost [--seconds 3]

Renders chats of some sizes with a small template in this process and through the pool, and prints medians, and how many
chats the pool renders a second.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time

from headrace_router.template_pool import TemplatePool
from headrace_router.template_process import Renderer
from headrace_router.tokenization import load_encoder
from tests.byte_model import make_card

SIZES = (100, 2_000, 20_000, 200_000)
NUM_CLIENTS = 8


async def measure(seconds: float) -> list[dict[str, float]]:
    pool = TemplatePool()
    encoder = (await load_encoder(make_card(), pool.learn)).chat
    here = Renderer()
    here.answer("learn", *encoder.spec)
    rows = []
    for size in SIZES:
        messages = [{"role": "user", "content": "many words " * (size // 11)}]
        chat = encoder.message(messages, add_generation_prompt=True, variables={}, max_chars=10**7)
        local, remote = [], []
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at:
            began_at = time.perf_counter()
            here.answer(*json.loads(chat))
            local.append(time.perf_counter() - began_at)
            began_at = time.perf_counter()
            await pool.render(encoder.spec, encoder.places, chat)
            remote.append(time.perf_counter() - began_at)
        num, ends_at = 0, time.perf_counter() + seconds

        async def client(chat: bytes = chat, ends_at: float = ends_at) -> int:
            num = 0
            while time.perf_counter() < ends_at:
                await pool.render(encoder.spec, encoder.places, chat)
                num += 1
            return num

        num = sum(await asyncio.gather(*(client() for _ in range(NUM_CLIENTS))))
        rows.append(
            {
                "chars": float(size),
                "here_ms": 1e3 * statistics.median(local),
                "pool_p50_ms": 1e3 * statistics.median(remote),
                "pool_p99_ms": 1e3 * statistics.quantiles(remote, n=100)[-1],
                "pool_per_s": num / seconds,
            }
        )
    await pool.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    for row in asyncio.run(measure(parser.parse_args().seconds)):
        sys.stdout.write("  ".join(f"{name} {value:.3g}" for name, value in row.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
