"""The compiled CPU kernels against torch and against this machine's limits, in shapes of SmolLM2-135M.

    python -m benchmarks.native [--threads N] [--repetitions 8]

Every line compares what ran in turn; the best of the repetitions counts. The limits are measured between the lines, the
same way: memory bandwidth by torch.sum over 256 MiB, arithmetic by a bfloat16 product of 1024 x 1024 matrices. With one
thread the time is the thread's own processor time, which other programs on the machine disturb least.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_shared.messages import BlockId, SamplingParams, SequenceId
from headrace_worker.attention.cpu import GatherAttention
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load as load_engine
from headrace_worker.huge_pages import Arena
from headrace_worker.inputs import build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.linear import make_linear
from headrace_worker.native import reference
from headrace_worker.native.attention import PagedBatch, paged_attention
from headrace_worker.native.library import load
from headrace_worker.native.linear import pack_weight, packed_linear
from headrace_worker.native.rows import argmax, rms_norm, rotate_and_write, silu_mul
from headrace_worker.sampling import SamplingState, sample
from headrace_worker.torch_engine import TorchEngine
from tests.worker.engine_driver import make_admission

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
SHAPES = [
    (HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
]
BLOCK_SIZE = 16
BF16 = torch.bfloat16
CPU = torch.device("cpu")


class Line(NamedTuple):
    name: str
    compiled: Callable[[], object]
    others: dict[str, Callable[[], object]]
    num_bytes: float
    """Read and written at least once."""
    flops: float


class Limits:
    """The best seen so far of what the machine can do."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._memory = torch.zeros(64 << 20)
        self._matrix = torch.randn(1024, 1024).to(BF16)
        self.bytes_per_s = 0.0
        self.flops_per_s = 0.0

    def measure(self) -> None:
        self.bytes_per_s = max(self.bytes_per_s, self._memory.nbytes / timed(self._memory.sum, self._clock))
        multiply = timed(lambda: self._matrix @ self._matrix, self._clock)
        self.flops_per_s = max(self.flops_per_s, 2 * 1024**3 / multiply)


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    call()
    return clock() - started


def linears() -> Iterator[Line]:
    weights = [[torch.randn(shape).to(BF16) for shape in SHAPES] for _ in range(LAYERS)]
    flat = [weight for layer in weights for weight in layer]
    arena = Arena()
    packed = [pack_weight(weight, arena=arena) for weight in flat]
    reordered = [make_linear(weight, None) for weight in flat]
    size = sum(weight.nbytes for weight in flat)
    for rows in (1, 4, 16, 64, 256):
        inputs = {width: torch.randn(rows, width).to(BF16) for width in (HIDDEN, INTERMEDIATE)}

        def run(multiply: Callable[[Tensor, int], Tensor], inputs: dict[int, Tensor] = inputs) -> None:
            for index, weight in enumerate(flat):
                multiply(inputs[weight.shape[1]], index)

        yield Line(
            f"linears of {LAYERS} layers, {rows} rows",
            partial(run, lambda x, index: packed_linear(x, packed[index])),
            {
                "F.linear": partial(run, lambda x, index: F.linear(x, flat[index])),
                "oneDNN packed": partial(run, lambda x, index: reordered[index](x)),
            },
            size,
            size * rows,
        )


def slices_of(num_sequences: int, num_queries: int, context: int) -> list[SequenceSlice]:
    blocks = math.ceil(context / BLOCK_SIZE)
    return [
        SequenceSlice(
            SequenceId(number),
            context - num_queries,
            num_queries,
            list(range(100, 100 + num_queries)),
            [BlockId(number * blocks + index) for index in range(blocks)],
            True,
        )
        for number in range(num_sequences)
    ]


def attention() -> Iterator[Line]:
    for num_sequences, num_queries, context in ((1, 1, 4096), (32, 1, 350), (1, 256, 256), (1, 256, 512)):
        cache = KVCache(
            num_layers=1,
            num_blocks=num_sequences * math.ceil(context / BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=BF16,
            device=CPU,
        )
        gather = GatherAttention(cache, num_heads=HEADS, context=context, scale=HEAD_DIM**-0.5, windows=[None])
        inputs = build_inputs(
            slices_of(num_sequences, num_queries, context),
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            null_block=cache.null_block,
            gathered_positions=gather.gathered_positions,
            device=CPU,
        )
        batch = PagedBatch(*inputs.ragged, block_size=BLOCK_SIZE)
        queries = torch.randn(num_sequences * num_queries, HEADS, HEAD_DIM).to(BF16)
        prepared = gather.prepare(inputs, cache)
        seen = num_queries * (context - num_queries) + num_queries * (num_queries + 1) / 2
        yield Line(
            f"attention, {num_sequences} x {num_queries} queries at {context}",
            partial(paged_attention, queries, cache.pages[0], batch),
            {"gather + SDPA": partial(prepared, 0, queries)},
            num_sequences * context * 2 * KV_HEADS * HEAD_DIM * 2,
            4.0 * num_sequences * HEADS * HEAD_DIM * seen,
        )


def rows() -> Iterator[Line]:
    num_rows = 256
    hidden, residual = torch.randn(2, num_rows, HIDDEN).to(BF16).unbind(0)
    yield Line(
        f"RMSNorm + residual, {num_rows} rows",
        lambda: rms_norm(hidden, epsilon=1e-5, residual=residual),
        {"torch": lambda: reference.rms_norm(hidden, epsilon=1e-5, residual=residual)},
        hidden.nbytes * 4,
        0,
    )
    qkv = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).to(BF16)
    pages = torch.zeros(num_rows // BLOCK_SIZE, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=BF16)
    rotations = torch.polar(torch.ones(num_rows, HEAD_DIM // 2), torch.randn(num_rows, HEAD_DIM // 2))
    tokens = np.arange(num_rows)
    first = tokens // BLOCK_SIZE * 2 * KV_HEADS * BLOCK_SIZE + tokens % BLOCK_SIZE
    slots = torch.from_numpy(first[:, None] + np.arange(2 * KV_HEADS) * BLOCK_SIZE)
    yield Line(
        f"rotary + cache write, {num_rows} rows",
        lambda: rotate_and_write(qkv, rotations, slots, pages),
        {"torch": lambda: reference.rotate_and_write(qkv, rotations, slots, pages)},
        qkv.nbytes * 2 + rotations.nbytes,
        0,
    )
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE).to(BF16)
    yield Line(
        f"SiLU x up, {num_rows} rows",
        lambda: silu_mul(gate_up),
        {"torch": lambda: reference.silu_mul(gate_up)},
        gate_up.nbytes * 1.5,
        0,
    )
    logits = torch.randn(32, VOCAB).to(BF16)
    yield Line(
        "arg-max, 32 rows", lambda: argmax(logits), {"torch": lambda: reference.argmax(logits)}, logits.nbytes, 0
    )


def draws() -> Iterator[Line]:
    kernels = load()
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 32):
        # Some tokens stand out, as in a model's logits.
        logits = torch.randn(num_rows, VOCAB, generator=generator) * 2.5
        logits[:, :20] += torch.rand(num_rows, 20, generator=generator) * 12
        for name, filters in (("temperature", {}), ("top-p 0.9", {"top_p": 0.9}), ("top-k 50", {"top_k": 50})):
            params = [SamplingParams(seed=row, temperature=0.7, **filters) for row in range(num_rows)]
            states = [SamplingState(make_admission([1], each), VOCAB) for each in params]
            yield Line(
                f"sampling, {name}, {num_rows} rows",
                partial(sample, logits, states, kernels=kernels),
                {"torch": partial(sample, logits, states)},
                logits.nbytes,
                0,
            )


def load_cpu_engine(threads: int, native: str = "auto", quantization: str = "none") -> TorchEngine:
    config = EngineConfig(
        native=native,
        quantization=quantization,
        dtype="bfloat16",
        device="cpu",
        num_threads=threads,
        num_blocks=1024,
    )
    engine = load_engine(config, lambda stage, done, total: None)
    assert isinstance(engine, TorchEngine)
    return engine


def iterations(threads: int) -> Iterator[Line]:
    compiled, int8, int4 = (load_cpu_engine(threads, quantization=name) for name in ("none", "int8", "int4"))
    plain = load_cpu_engine(threads, native="off")
    num_parameters = LAYERS * sum(math.prod(shape) for shape in SHAPES)
    for num_sequences, num_queries, context in ((1, 1, 350), (4, 1, 350), (16, 1, 350), (32, 1, 350), (1, 256, 256)):
        slices = slices_of(num_sequences, num_queries, context)
        tokens = num_sequences * num_queries
        weights = 2.0 * (num_parameters + VOCAB * HIDDEN)
        cached = num_sequences * context * LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
        yield Line(
            f"whole iteration, {num_sequences} x {num_queries} tokens at {context}",
            partial(compiled.logits, slices),
            {
                "torch engine": partial(plain.logits, slices),
                "int8": partial(int8.logits, slices),
                "int4": partial(int4.logits, slices),
            },
            weights + cached,
            2.0 * (tokens * num_parameters + num_sequences * VOCAB * HIDDEN),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repetitions", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    limits = Limits(clock)
    print(f"kernels: {load().matmul_kind}, threads: {arguments.threads}")
    print(f"{'':44}{'ms':>9}  {'of the limit':16}compared with")
    for lines in (linears(), attention(), rows(), draws(), iterations(arguments.threads)):
        for line in lines:
            best = math.inf
            others = dict.fromkeys(line.others, math.inf)
            for _ in range(arguments.repetitions):
                best = min(best, timed(line.compiled, clock))
                for name, call in line.others.items():
                    others[name] = min(others[name], timed(call, clock))
                limits.measure()
            shares = {
                "memory": line.num_bytes / best / limits.bytes_per_s,
                "arithmetic": line.flops / best / limits.flops_per_s,
            }
            bound = max(shares, key=lambda name: shares[name])
            ratios = ", ".join(f"{name} {other / best:.2f} x" for name, other in others.items())
            print(f"{line.name:44}{best * 1e3:9.3f}  {shares[bound]:4.0%} {bound:11}{ratios}", flush=True)
    print(f"limits: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s in bfloat16")


if __name__ == "__main__":
    main()
