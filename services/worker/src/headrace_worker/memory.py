"""How much memory a device has to use, so that too little is said at the start and not by the kernel's killer."""

import torch

from headrace_shared.errors import ConfigError
from headrace_shared.machine import available_memory
from headrace_worker.config import EngineConfig

WORKSPACE_BYTES = 256 << 20
"""Of an engine process, beside weights and cache: activations, buffers, the tokenizer."""


def available_bytes(device: torch.device) -> int | None:
    """What this process may still allocate. None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory()


def check_room(who_needs: str, weights: int, cache: int, more: int, device: torch.device) -> None:
    """Bytes. `who_needs`: the error's first words. Raises ConfigError where there is less."""
    needed = weights + cache + more
    available = available_bytes(device)
    if available is not None and needed > available:
        raise ConfigError(
            "kv_cache_bytes" if cache > weights else "model",
            f"{who_needs} {mib(needed)} of memory (weights {mib(weights)}, KV cache {mib(cache)}), "
            f"but only {mib(available)} are available",
        )


def planned_blocks(config: EngineConfig, kv_bytes_per_token: int) -> int:
    """KV blocks of an engine on a CPU. Raises ConfigError."""
    if config.num_blocks:
        return config.num_blocks
    num_blocks = config.kv_cache_bytes // (config.block_size * kv_bytes_per_token)
    if num_blocks < 1:
        raise ConfigError(
            "kv_cache_bytes", f"{config.kv_cache_bytes} bytes hold no block of {config.block_size} tokens"
        )
    return num_blocks


def mib(num_bytes: int) -> str:
    """As a user reads it."""
    return f"{num_bytes / 2**20:,.0f} MiB"
