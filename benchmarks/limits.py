"""What this machine can do at most, measured, and what that allows on the standard workload."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from headrace_worker.models.config import ModelConfig

PROMPT, OUTPUT = 320, 64
"""Tokens of the standard workload's mean request."""


class Limits(NamedTuple):
    bytes_per_s: float
    flops_per_s: float
    """Of a bfloat16 product of 1024 x 1024 matrices."""


def measure(repetitions: int = 10) -> Limits:
    """The best of some repetitions, on all cores."""
    memory = torch.zeros(128 << 20)
    matrix = torch.randn(1024, 1024).bfloat16()
    with torch.inference_mode():
        read_s = min(_timed(memory.sum) for _ in range(repetitions))
        multiply_s = min(_timed(lambda: matrix @ matrix) for _ in range(repetitions))
    return Limits(memory.nbytes / read_s, 2 * 1024**3 / multiply_s)


def tokens_per_s(config: ModelConfig, limits: Limits, concurrency: int, weight_bits: float = 16.0) -> float:
    """Output tokens a second of the standard workload if only memory and arithmetic took time. One request alone
    computes its prompt, then reads all weights for each token; of several, the slower of the two is what counts."""
    matrices = config.num_parameters
    layers = matrices - config.vocab_size * config.hidden_size
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim
    prompt_flops = 2.0 * PROMPT * layers + attention * PROMPT**2 / 2
    output_flops = 2.0 * OUTPUT * matrices + attention * OUTPUT * (PROMPT + OUTPUT / 2)
    cached = OUTPUT * (PROMPT + OUTPUT / 2) * config.kv_bytes_per_token(2)
    weights = matrices * weight_bits / 8
    if concurrency == 1:
        return OUTPUT / (prompt_flops / limits.flops_per_s + ((OUTPUT - 1) * weights + cached) / limits.bytes_per_s)
    compute_s = (prompt_flops + output_flops) / limits.flops_per_s
    memory_s = (OUTPUT * weights / concurrency + cached) / limits.bytes_per_s
    return OUTPUT / max(compute_s, memory_s)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
