"""Builds an engine from its configuration."""

import torch

from headrace_shared.errors import ConfigError
from headrace_shared.machine import num_cores
from headrace_worker.adapters.store import AdapterStore
from headrace_worker.adapters.weights import AdapterReader
from headrace_worker.config import EngineConfig, check_model, with_defaults
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.load import load_on_gpu
from headrace_worker.forward import Forward, load_forward
from headrace_worker.iteration import Report
from headrace_worker.kv_cache import KVCache
from headrace_worker.memory import WORKSPACE_BYTES, check_room, planned_blocks
from headrace_worker.models.checkpoint import Checkpoint, open_model
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.source import find_model
from headrace_worker.models.weight_bytes import packed_bytes
from headrace_worker.native.packing import Quantization, weight_bits
from headrace_worker.pooling import Pooling, last_norm
from headrace_worker.torch_engine import TorchEngine

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(config: EngineConfig, report: Report) -> TorchEngine | CudaEngine:
    """Loads the model. Raises ConfigError, with one line for the user, if that cannot work."""
    device = find_device(config.device)
    dtype = find_dtype(config.dtype, device)
    config = with_defaults(config, on_gpu=device.type == "cuda")
    torch.set_num_threads(config.num_threads or num_cores())
    report("finding the model", 0, 1)
    files = find_model(config.model, lambda done, total: report("downloading", done, total))
    checkpoint = open_model(files, config.generation_config)
    report("finding the model", 1, 1)
    check_model(config, checkpoint.config)
    if config.speculative_tokens and device.type == "cuda":
        raise ConfigError("speculative_tokens", "drafts are verified on CPUs only")
    if config.quantization == "fp8" and device.type != "cuda":
        raise ConfigError("quantization", "fp8 weights need a GPU")
    if device.type == "cuda":
        return load_on_gpu(checkpoint, config.served_name or files.name, config, device, dtype, report)
    longest = min(checkpoint.config.context, config.context or checkpoint.config.context)
    num_blocks = planned_blocks(config, checkpoint.config.kv_bytes_per_token(dtype.itemsize))
    quantization = _quantization(config, checkpoint)
    _check_memory(checkpoint.config, num_blocks * config.block_size, dtype, quantization, device)
    bind = load_forward(
        checkpoint.config,
        checkpoint.source,
        native=config.native,
        block_size=config.block_size,
        context=longest,
        dtype=dtype,
        device=device,
        report=lambda done, total: report("loading weights", done, total),
        deterministic=config.deterministic,
        quantization=quantization,
    )
    cache = KVCache.of_model(
        checkpoint.config, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device
    )
    context = min(longest, num_blocks * config.block_size)
    report("reading the tokenizer", 0, 1)
    card = checkpoint.make_card(config.served_name or files.name, context)
    report("reading the tokenizer", 1, 1)
    forward = bind(cache, context)
    return TorchEngine(
        forward,
        cache,
        card,
        context=context,
        max_sequences=config.max_sequences,
        tokens_per_iteration=config.tokens_per_iteration,
        device=device,
        dtype=dtype,
        max_drafts=config.speculative_tokens,
        adapters=_adapters(config, checkpoint, forward, dtype, device),
        pooling=Pooling(
            checkpoint.config.hidden_size,
            last_norm(checkpoint.config, checkpoint.source) if forward.folds_norms else None,
            device,
        ),
    )


def _adapters(
    config: EngineConfig, checkpoint: Checkpoint, forward: Forward, dtype: torch.dtype, device: torch.device
) -> AdapterStore | None:
    if not config.max_loras:
        return None
    reader = AdapterReader(
        checkpoint.config,
        checkpoint.source,
        folds_norms=forward.folds_norms,
        max_rank=config.max_lora_rank,
        dtype=dtype,
        device=device,
    )
    return AdapterStore(reader, forward.set_adapter, config.max_loras)


def find_device(name: str) -> torch.device:
    """Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"there is no {name}")
    return device


def find_dtype(name: str, device: torch.device) -> torch.dtype:
    """Raises ConfigError."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise ConfigError("dtype", f"{name!r} is not auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _cpu_computes_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _quantization(config: EngineConfig, checkpoint: Checkpoint) -> Quantization:
    wanted = Quantization(config.quantization)
    return Quantization.NONE if wanted is Quantization.AUTO and not checkpoint.is_quantized else wanted


def _check_memory(
    model: ModelConfig, num_positions: int, dtype: torch.dtype, quantization: Quantization, device: torch.device
) -> None:
    cache = num_positions * model.kv_bytes_per_token(dtype.itemsize)
    bits = weight_bits(quantization, model.vocab_size)
    if bits is None:
        # Tied matrices are kept twice: rows for the embedding, packed for the head.
        tied = model.vocab_size * model.hidden_size if model.ties_embeddings else 0
        weights = (model.num_parameters + tied) * dtype.itemsize
    else:
        weights = packed_bytes(model, dtype.itemsize, bits)
    largest = model.vocab_size * model.hidden_size * torch.float32.itemsize
    check_room("needs", weights, cache, 2 * largest + WORKSPACE_BYTES, device)
