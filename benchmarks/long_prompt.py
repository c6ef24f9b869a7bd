"""A long prompt that arrives among streams: what those who decode feel of it. The real engine, in this process.

    python -m benchmarks.long_prompt [--prompt 6000] [--streams 16] [--tokens 600] [--slowdowns 1.5 0] [--threads 2]

Prints one JSON object: quantiles of the time between two tokens of a stream without and with the prompt, their ratios,
and the prompt's time to first token, for each bound (`--decode-slowdown` of the worker; 0: none).
"""

import argparse
import json
import sys
import time

from headrace_shared.codec import pack_ids
from headrace_shared.messages import (
    Admission,
    BlockId,
    Request,
    RequestId,
    RouterId,
    SamplingParams,
    SequenceId,
    StopParams,
)
from headrace_shared.quantiles import quantile
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.iteration import Engine
from headrace_worker.loop import IterationLoop

STREAM_PROMPT = 32
BEFORE = 30
"""Iterations of the streams alone before the prompt comes."""


class Run:
    def __init__(self, engine: Engine, slowdown: float) -> None:
        self._size = engine.facts.block_size
        self._loop = IterationLoop(engine, decode_slowdown=slowdown)
        self._next_block = 0

    def admit(self, number: int, num_prompt: int, num_tokens: int) -> None:
        count = -(-(num_prompt + num_tokens) // self._size)
        blocks = tuple(BlockId(self._next_block + i) for i in range(count))
        self._next_block += count
        request = Request(
            request_id=RequestId(f"{number:032x}"),
            router=RouterId("none"),
            model="",
            prompt=pack_ids((number * 7919 + i * 31) % 40_000 + 100 for i in range(num_prompt)),
            sampling=SamplingParams(seed=number, temperature=0.0),
            stop=StopParams(max_tokens=num_tokens),
        )
        self._loop.admit(
            Admission(sequence_id=SequenceId(number), request=request, choice=0, attempt=0, block_ids=blocks)
        )

    def go(self, options: argparse.Namespace, *, has_prompt: bool) -> tuple[list[float], float]:
        """Times between tokens of the streams, and the prompt's time to its first token."""
        for number in range(1, options.streams + 1):
            self.admit(number, STREAM_PROMPT, options.tokens)
        last: dict[int, float] = {}
        pauses: list[float] = []
        came_at = first_token_s = 0.0
        num_iterations = 0
        while (result := self._loop.step()) is not None:
            now = time.perf_counter()
            num_iterations += 1
            for row in result.sequences:
                if row.token is None:
                    continue
                if row.sequence_id > options.streams:
                    first_token_s = now - came_at
                elif num_iterations > BEFORE and row.sequence_id in last:
                    pauses.append(now - last[row.sequence_id])
                last[row.sequence_id] = now
            if has_prompt and num_iterations == BEFORE:
                came_at = now
                self.admit(options.streams + 1, options.prompt, 1)
        return pauses, first_token_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.5, 0.0])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    engine = load(EngineConfig(num_threads=options.threads), lambda stage, current, total: None)
    alone, _ = Run(engine, 0.0).go(options, has_prompt=False)
    result: dict[str, object] = {"alone_ms": _quantiles(alone)}
    for slowdown in options.slowdowns:
        pauses, first_token_s = Run(engine, slowdown).go(options, has_prompt=True)
        result[f"slowdown {slowdown:g}"] = {
            "ms": _quantiles(pauses),
            "p99_ratio": round(quantile(pauses, 0.99) / quantile(alone, 0.99), 2),
            "prompt_ttft_s": round(first_token_s, 2),
        }
    sys.stdout.write(json.dumps(result) + "\n")


def _quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{share * 100:g}": round(1000 * quantile(values, share), 1) for share in (0.5, 0.9, 0.99)}


if __name__ == "__main__":
    main()
