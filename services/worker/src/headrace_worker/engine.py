"""Builds an engine from its configuration."""

import os
from collections.abc import Callable

import torch

from headrace_shared.errors import ConfigError
from headrace_shared.messages import ModelCard
from headrace_worker.config import EngineConfig
from headrace_worker.kv_cache import KVCache
from headrace_worker.memory import available_bytes
from headrace_worker.models.card import card_from_folder, card_from_gguf, read_json
from headrace_worker.models.config import LlamaConfig, config_from_hf
from headrace_worker.models.gguf import GgufFile, GgufTensors, gguf_config
from headrace_worker.models.llama import build_llama
from headrace_worker.models.source import ModelFiles, find_model
from headrace_worker.models.weights import SafetensorsFolder, TensorSource
from headrace_worker.torch_engine import TorchEngine

Report = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)"""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WORKSPACE_BYTES = 256 << 20
"""Beside weights and cache: activations, buffers, the tokenizer."""
_GPU_SHARE = 0.9
"""Of the free memory after loading the weights, for the cache."""


def load(config: EngineConfig, report: Report) -> TorchEngine:
    """Loads the model and warms it up. Raises ConfigError, with one line for the user, if that cannot work."""
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    report("finding the model", 0, 1)
    files = find_model(config.model)
    report("finding the model", 1, 1)
    architecture, source = _open(files)
    context = min(architecture.context, config.context or architecture.context)
    num_blocks = config.num_blocks or _blocks_in(config.kv_cache_bytes, architecture, config.block_size, dtype)
    if num_blocks < 1:
        raise ConfigError(
            "kv_cache_bytes", f"{config.kv_cache_bytes} bytes hold no block of {config.block_size} tokens"
        )
    if device.type == "cpu" or config.num_blocks:
        key = "num_blocks" if config.num_blocks else "kv_cache_bytes"
        _check_memory(architecture, num_blocks * config.block_size, dtype, device, key)
    model = build_llama(
        architecture,
        source,
        dtype=dtype,
        device=device,
        report=lambda done, total: report("loading weights", done, total),
    )
    if device.type == "cuda" and not config.num_blocks:
        free = available_bytes(device) or 0
        num_blocks = _blocks_in(int(free * _GPU_SHARE), architecture, config.block_size, dtype)
    cache = KVCache(
        num_layers=architecture.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
        device=device,
    )
    context = min(context, num_blocks * config.block_size)
    report("reading the tokenizer", 0, 1)
    card = _card(files, config.served_name or files.name, architecture.vocab_size, context)
    report("reading the tokenizer", 1, 1)
    engine = TorchEngine(
        model,
        cache,
        card,
        context=context,
        max_sequences=config.max_sequences,
        tokens_per_iteration=config.tokens_per_iteration,
        device=device,
        dtype=dtype,
    )
    report("warming up", 0, 1)
    engine.warm_up()
    report("warming up", 1, 1)
    return engine


def _device(name: str) -> torch.device:
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


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise ConfigError("dtype", f"{name!r} is not auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _cpu_computes_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _open(files: ModelFiles) -> tuple[LlamaConfig, TensorSource]:
    if files.path.is_dir():
        return config_from_hf(read_json(files.path / "config.json")), SafetensorsFolder(files.path)
    file = GgufFile(files.path)
    architecture = gguf_config(file)
    return architecture, GgufTensors(file, architecture)


def _card(files: ModelFiles, name: str, vocab_size: int, context: int) -> ModelCard:
    if files.path.is_dir():
        return card_from_folder(files.path, name=name, vocab_size=vocab_size, context=context)
    return card_from_gguf(GgufFile(files.path), name=name, vocab_size=vocab_size, context=context)


def _blocks_in(num_bytes: int, architecture: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
    return num_bytes // (block_size * architecture.kv_bytes_per_token(dtype.itemsize))


def _check_memory(
    architecture: LlamaConfig, num_positions: int, dtype: torch.dtype, device: torch.device, cache_key: str
) -> None:
    cache = num_positions * architecture.kv_bytes_per_token(dtype.itemsize)
    # Tied matrices are kept twice: rows for the embedding, packed for the head.
    tied = architecture.vocab_size * architecture.hidden_size if architecture.ties_embeddings else 0
    weights = (architecture.num_parameters + tied) * dtype.itemsize
    largest = architecture.vocab_size * architecture.hidden_size * torch.float32.itemsize
    needed = weights + cache + 2 * largest + _WORKSPACE_BYTES
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ConfigError(
            cache_key if cache > weights else "model",
            f"needs {_mib(needed)} of memory (weights {_mib(weights)}, KV cache {_mib(cache)}), "
            f"but only {_mib(available)} are available",
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
