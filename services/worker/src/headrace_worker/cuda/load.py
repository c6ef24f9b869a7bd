"""Loads a model onto a CUDA device."""

import torch

from headrace_shared.errors import ConfigError
from headrace_worker.config import EngineConfig
from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.device import CudaDevice
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.iteration import Report
from headrace_worker.models.checkpoint import Checkpoint


def load_on_gpu(
    checkpoint: Checkpoint, name: str, config: EngineConfig, device: torch.device, dtype: torch.dtype, report: Report
) -> CudaEngine:
    """`name`: how the model is called. Raises ConfigError for what cannot be run there."""
    _check_quantization(config, device)
    return build_engine(
        checkpoint.config,
        checkpoint.source,
        cuda_backend(config, device, checkpoint.config.vocab_size),
        sizes_of(config, checkpoint.config.context),
        lambda context: checkpoint.make_card(name, context),
        dtype=dtype,
        report=report,
    )


def cuda_backend(config: EngineConfig, device: torch.device, vocab_size: int) -> Backend:
    """Raises ConfigError where there is no Triton."""
    try:
        from headrace_worker.cuda.triton_backend import triton_backend
    except ImportError as error:
        raise ConfigError("device", f"{device} needs the Python package triton: {error}") from error
    return triton_backend(
        CudaDevice(device),
        deterministic=config.deterministic,
        quantization=config.quantization,
        vocab_size=vocab_size,
    )


def sizes_of(config: EngineConfig, longest: int) -> Sizes:
    """`longest`: the model's own context."""
    return Sizes(
        context=min(longest, config.context or longest),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_sequences=config.max_sequences,
        tokens_per_iteration=config.tokens_per_iteration,
        memory_share=config.gpu_memory_share,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
    )


def _check_quantization(config: EngineConfig, device: torch.device) -> None:
    kind = config.quantization
    if kind not in ("none", "int8", "int4", "fp8"):
        raise ConfigError("quantization", f"{kind} is for CPUs only")
    if kind != "none" and config.deterministic:
        raise ConfigError("deterministic", f"on a GPU not with {kind} weights")
    if kind == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("quantization", f"{device} has no 8-bit floating-point units")
