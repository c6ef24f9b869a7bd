"""Engines with compiled kernels on tiny random checkpoints."""

from pathlib import Path
from typing import Any

from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.iteration import SequenceSlice
from headrace_worker.torch_engine import TorchEngine

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


BLOCK_SIZE = 16


def load_tiny(
    folder: Path,
    *,
    native: str = "auto",
    dtype: str = "bfloat16",
    quantization: str = "none",
    block_size: int = BLOCK_SIZE,
) -> TorchEngine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        block_size=block_size,
        num_blocks=100,
        num_threads=2,
        native=native,
        quantization=quantization,
    )
    engine = load(config, lambda what, done, total: None)
    assert isinstance(engine, TorchEngine)
    return engine


def slice_of(
    tokens: list[int], start: int, end: int, *, number: int = 0, block_size: int = BLOCK_SIZE
) -> SequenceSlice:
    """Every sequence has 20 blocks of its own, in an order of its own."""
    blocks = [BlockId(number * 20 + index * 7 % 20) for index in range(-(-end // block_size))]
    return SequenceSlice(SequenceId(number), start, end - start, tokens[start:end], blocks, True)


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).square().mean().sqrt())
