"""The engine's configuration: values only, read once. `settings.py` turns flags and environment into it."""

from msgspec import Struct
from msgspec.structs import replace

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import ModelConfig
from headrace_worker.parallel.place import RankPlace


class EngineConfig(Struct, frozen=True, kw_only=True):
    model: str = "smollm2-135m"
    """Built-in name, checkpoint folder, GGUF file, or hub id."""
    served_name: str = ""
    """Name in the API; empty: derived from `model`."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto: bfloat16 where the device computes it fast, else float32."""
    context: int = 0
    """Bound on tokens per sequence; 0: the model's own."""
    block_size: int = 16
    num_blocks: int = 0
    """KV blocks; 0: from `kv_cache_bytes` (CPU) or free memory (GPU)."""
    kv_cache_bytes: int = 640 << 20
    max_sequences: int = 0
    """0: 64 on a CPU, 256 on a GPU."""
    tokens_per_iteration: int = 0
    """0: 256 on a CPU, 2048 on a GPU."""
    native: str = "auto"
    """auto: kernels compiled for this CPU, or torch's own where there is no C++ compiler; off: torch's own."""
    num_threads: int = 0
    """CPU threads for tensor work; 0: all cores that this process may use."""
    deterministic: bool = False
    """A request's tokens do not depend on what else is computed with it."""
    gpu_memory_share: float = 0.9
    """Of a GPU's memory, for weights, cache and all else of this process."""
    quantization: str = "none"
    """Of the weights: none, int8, int4, on a CPU also auto (what a quantized file has), on a GPU also fp8."""
    decode_slowdown: float = 1.5
    """Most that a long prompt lengthens an iteration in which others decode; 0: no bound."""
    speculative_tokens: int = 0
    """Most tokens that are guessed ahead for a sequence in an iteration; 0: none."""
    max_loras: int = 8
    """Most LoRA adapters that are loaded at a time; 0: none are served."""
    max_lora_rank: int = 64
    generation_config: str = "auto"
    """auto: the model's own defaults for sampling; none: OpenAI's."""
    place: RankPlace = RankPlace()
    """Which rank of the engine this process is."""


def with_defaults(config: EngineConfig, *, on_gpu: bool) -> EngineConfig:
    """Sizes that are left open, filled in: what a CPU computes in some tens of milliseconds, or what keeps the matrix
    units of a GPU busy without keeping those that decode waiting for a tenth of a second."""
    return replace(
        config,
        max_sequences=config.max_sequences or (256 if on_gpu else 64),
        tokens_per_iteration=config.tokens_per_iteration or (2048 if on_gpu else 256),
    )


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for settings that are not for such a model: experts are multiplied by torch's grouped product,
    which takes no quantized weights, and whose sums may depend on how many rows an expert gets."""
    if model.mixture is None:
        return
    if config.quantization not in ("none", "auto"):
        raise ConfigError("quantization", f"{config.quantization} weights are not for mixtures of experts")
    if config.deterministic:
        raise ConfigError("deterministic", "not for mixtures of experts")
