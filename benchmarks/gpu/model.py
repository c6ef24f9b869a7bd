"""Decoding and prefilling of an 8B model on the engine: how close to what memory and matrix units allow."""

import gc

import torch

from benchmarks.gpu.engine import random_engine
from benchmarks.gpu.measuring import IS_DRY, Ceilings, ceilings
from benchmarks.gpu.report import Row, emit
from benchmarks.gpu.shapes import model_config
from benchmarks.gpu.steady import run
from headrace_shared.messages import SamplingParams
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.models.config import ModelConfig

SECTION = "model"
BATCHES = (1, 2) if IS_DRY else (1, 8, 64, 256)
NUM_PROMPT = 9 if IS_DRY else 512
NUM_DECODES = 2 if IS_DRY else 64
DECODE_TARGETS = {1: 0.8, 64: 0.7}
PREFILL_TARGET = 0.6
GAP_TARGET = 0.05
SAMPLED = SamplingParams(seed=1, temperature=0.8, top_p=0.95, presence_penalty=0.2)


def load(config: ModelConfig, *, deterministic: bool = False) -> CudaEngine:
    sizes = Sizes(
        context=64 if IS_DRY else 2048,
        block_size=16,
        num_blocks=16 if IS_DRY else 0,
        max_sequences=BATCHES[-1],
        tokens_per_iteration=12 if IS_DRY else 4096,
        memory_share=0.9,
    )
    return random_engine(config, sizes, deterministic=deterministic)


def matrix_parameters(config: ModelConfig) -> int:
    """Of the layers: what every token is multiplied with."""
    matrices = 1 if config.ties_embeddings else 2
    return config.num_parameters - matrices * config.vocab_size * config.hidden_size


def decode_floor_s(config: ModelConfig, batch: int, context: int, limits: Ceilings) -> float:
    """The least time of an iteration: every weight and every cached key and value read once, or all products."""
    head = config.vocab_size * config.hidden_size
    weights = matrix_parameters(config) + head
    num_bytes = 2 * weights + batch * context * config.kv_bytes_per_token(2)
    return max(num_bytes / limits.bytes_per_s, 2 * batch * weights / limits.flops_per_s)


def prefill_flops(config: ModelConfig, batch: int, num_prompt: int) -> float:
    per_sequence = 2 * matrix_parameters(config) * num_prompt + 2 * config.vocab_size * config.hidden_size
    # Scores and mixing: two products, and half of the square is masked.
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * num_prompt**2 / 2
    return batch * (per_sequence + attention)


def measure(engine: CudaEngine, config: ModelConfig, limits: Ceilings) -> None:
    for batch in BATCHES:
        got = run(engine, batch, NUM_PROMPT, NUM_DECODES)
        floor_s = decode_floor_s(config, batch, NUM_PROMPT + NUM_DECODES // 2, limits)
        emit(
            Row(
                SECTION,
                f"decode, batch {batch}: {got.decode_s * 1e3:.2f} ms an iteration",
                batch / got.decode_s,
                "tokens/s",
                floor_s / got.decode_s,
                "roofline",
                DECODE_TARGETS.get(batch),
            )
        )
        if got.idle_share is not None:
            emit(
                Row(
                    SECTION,
                    f"host gap, batch {batch}",
                    got.idle_share * got.decode_s * 1e6,
                    "µs",
                    got.idle_share,
                    "the iteration",
                    GAP_TARGET,
                    target_is_most=True,
                )
            )
        rate = prefill_flops(config, batch, NUM_PROMPT) / got.prefill_s
        emit(
            Row(
                SECTION,
                f"prefill, {batch} x {NUM_PROMPT} tokens: {got.prefill_s * 1e3:.1f} ms",
                batch * NUM_PROMPT / got.prefill_s,
                "tokens/s",
                rate / limits.flops_per_s,
                "matrix rate",
                # A single short prompt does not fill the device.
                PREFILL_TARGET if batch >= 8 else None,
            )
        )


def measure_sampling(engine: CudaEngine) -> None:
    for batch in BATCHES[-2:]:
        greedy = run(engine, batch, NUM_PROMPT, NUM_DECODES)
        sampled = run(engine, batch, NUM_PROMPT, NUM_DECODES, SAMPLED)
        emit(
            Row(
                SECTION,
                f"decode, batch {batch}, top-p and penalties",
                batch / sampled.decode_s,
                "tokens/s",
                greedy.decode_s / sampled.decode_s,
                "greedy",
            )
        )


def measure_deterministic(config: ModelConfig, limits: Ceilings) -> None:
    engine = load(config, deterministic=True)
    for batch in BATCHES[:1] + BATCHES[2:3]:
        got = run(engine, batch, NUM_PROMPT, NUM_DECODES)
        floor_s = decode_floor_s(config, batch, NUM_PROMPT + NUM_DECODES // 2, limits)
        emit(
            Row(
                SECTION,
                f"decode, batch {batch}, deterministic",
                batch / got.decode_s,
                "tokens/s",
                floor_s / got.decode_s,
                "roofline",
            )
        )


def main() -> None:
    config = model_config(tiny=IS_DRY)
    limits = ceilings()
    emit(Row(SECTION, "copy bandwidth", limits.bytes_per_s / 1e9, "GB/s"))
    emit(Row(SECTION, "bfloat16 matrix rate", limits.flops_per_s / 1e12, "TFLOP/s"))
    engine = load(config)
    measure(engine, config, limits)
    measure_sampling(engine)
    del engine
    gc.collect()
    if not IS_DRY:
        torch.cuda.empty_cache()
    measure_deterministic(config, limits)


if __name__ == "__main__":
    main()
