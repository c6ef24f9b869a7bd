"""The engine's configuration: values only, read once. `settings.py` turns flags and environment into it."""

from msgspec import Struct

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
    kv_cache_bytes: int = 1 << 30
    max_sequences: int = 64
    tokens_per_iteration: int = 256
    native: str = "auto"
    """auto: kernels compiled for this CPU, or torch's own where there is no C++ compiler; off: torch's own."""
    num_threads: int = 0
    """CPU threads for tensor work; 0: all cores that this process may use."""
    place: RankPlace = RankPlace()
    """Which rank of the engine this process is."""
