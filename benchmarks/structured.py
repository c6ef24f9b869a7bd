"""What sequences with a grammar cost those without one that are computed beside them. The real engine, in this process.

    python -m benchmarks.structured [--streams 16] [--tokens 200] [--rounds 5] [--threads 2]

All streams free, and then half of them under a JSON schema, in turn. Prints one JSON object: time between two tokens of
a stream that is free in both, and output tokens a second.
"""

import argparse
import json
import sys
import time
from statistics import median

from llguidance import LLMatcher

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

PROMPT = 64
BEFORE = 20
"""Iterations in which prompts are computed and grammars compiled."""
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}},
        "price": {"type": "number"},
        "kind": {"enum": ["book", "film", "song"]},
        "text": {"type": "string"},
    },
    "required": ["title", "tags", "price", "kind", "text"],
    "additionalProperties": False,
}

GRAMMAR = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
NAMES = ("p50_ms", "p99_ms", "tokens_per_s")


def play(engine: Engine, options: argparse.Namespace, num_bound: int, number: int) -> tuple[list[float], float]:
    """`num_bound` of the streams have a grammar. Times between tokens of the free half, and tokens a second of all."""
    size = engine.facts.block_size
    loop = IterationLoop(engine)
    count = -(-(PROMPT + options.tokens) // size)
    half = options.streams // 2
    for stream in range(options.streams):
        grammar = GRAMMAR if half <= stream < half + num_bound else ""
        request = Request(
            request_id=RequestId(f"{number * 1000 + stream:032x}"),
            router=RouterId("none"),
            model="",
            prompt=pack_ids((stream * 7919 + i * 31) % 40_000 + 100 for i in range(PROMPT)),
            sampling=SamplingParams(seed=stream, temperature=1.0, grammar=grammar),
            stop=StopParams(max_tokens=options.tokens),
        )
        sequence_id = SequenceId(number * 1000 + stream + 1)
        blocks = tuple(BlockId(stream * count + block) for block in range(count))
        loop.admit(Admission(sequence_id=sequence_id, request=request, choice=0, attempt=0, block_ids=blocks))
    last: dict[int, float] = {}
    pauses: list[float] = []
    num_iterations = num_tokens = num_over = 0
    began = now = time.perf_counter()
    # Once one has ended fewer are computed: nothing is compared then.
    while not num_over and (result := loop.step()) is not None:
        now = time.perf_counter()
        num_iterations += 1
        if num_iterations == BEFORE:
            began, num_tokens = now, 0
        for row in result.sequences:
            num_over += row.finish is not None or row.error is not None
            if row.token is None:
                continue
            num_tokens += 1
            stream = row.sequence_id - number * 1000 - 1
            if stream < half:
                if num_iterations > BEFORE and stream in last:
                    pauses.append(now - last[stream])
                last[stream] = now
    for stream in range(options.streams):
        loop.release(SequenceId(number * 1000 + stream + 1))
    while loop.step() is not None:
        pass
    return pauses, num_tokens / (now - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    engine = load(EngineConfig(num_threads=options.threads), lambda stage, current, total: None)
    half = options.streams // 2
    rows: dict[int, list[tuple[float, float, float]]] = {0: [], half: []}
    for number in range(1, options.rounds + 1):
        for num_bound, figures in rows.items():
            pauses, rate = play(engine, options, num_bound, 2 * number + bool(num_bound))
            figures.append((1000 * quantile(pauses, 0.5), 1000 * quantile(pauses, 0.99), rate))
    free, mixed = ([median(column) for column in zip(*rows[key], strict=True)] for key in (0, half))
    result = {
        "free": dict(zip(NAMES, (round(value, 2) for value in free), strict=True)),
        "half_bound": dict(zip(NAMES, (round(value, 2) for value in mixed), strict=True)),
        "p50_ratio": round(mixed[0] / free[0], 3),
        "p99_ratio": round(mixed[1] / free[1], 3),
        "throughput_ratio": round(mixed[2] / free[2], 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
