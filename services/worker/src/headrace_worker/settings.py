"""Settings of the worker: those of every service, the engine's, and how the I/O process treats the engine process."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace_worker.config import EngineConfig
from headrace_worker.timing.settings import TimingSettings


class WorkerSettings(TimingSettings, frozen=True, kw_only=True):
    model: str = "smollm2-135m"
    """Built-in name, checkpoint folder, GGUF file, or hub id."""
    served_name: str = ""
    """Name of the model in the API; empty: derived from the model."""
    device: Annotated[str, Meta(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and cache; auto: bfloat16 where the device computes it fast, else float32."""
    context: Annotated[int, Meta(ge=0)] = 0
    """Most tokens (prompt and answer) of a sequence; 0: the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling for requests that do not say otherwise; auto: what the model's generation_config.json, GGUF file or, for
    the built-in model, authors recommend; none: temperature 1 and no filters."""
    block_size: Annotated[int, Meta(ge=4, le=256)] = 16
    """Tokens in a block of the KV cache."""
    num_blocks: Annotated[int, Meta(ge=0)] = 0
    """Blocks of the KV cache; 0: as many as kv-cache-bytes (CPU) or the free memory (GPU) hold."""
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] = 640 << 20
    """Size of the KV cache on a CPU."""
    max_sequences: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Most sequences in one iteration; 0: 64 on a CPU, 256 on a GPU."""
    tokens_per_iteration: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Most tokens that one iteration computes; 0: 256 on a CPU, 2048 on a GPU."""
    decode_slowdown: Annotated[float, Meta(ge=0, le=1000)] = 1.5
    """Factor by which one long prompt (more than 1024 tokens, and than an iteration) may lengthen iterations in which
    others decode; 0: no bound. Several long prompts at a time may do more."""
    native: Literal["auto", "off"] = "auto"
    """Kernels compiled for this CPU at the first start; auto: torch's own where there is no C++ compiler."""
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads for tensor work; 0: all cores that the process may use."""
    deterministic: bool = False
    """The same request gives the same tokens whatever else is computed with it; costs some speed on a GPU. Not for
    mixtures of experts, nor with tensor_parallel above 1."""
    gpu_memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that the worker may use."""
    quantization: Literal["none", "auto", "int8", "int4", "fp8"] = "none"
    """Weights in 8 or 4 bits, on a GPU or a CPU with compiled kernels; auto (CPU): as many as a quantized GGUF file
    has; fp8 (GPU): activations too."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes (on GPUs: one each) that share the work of every layer."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Stages that the layers are dealt out to, each with tensor-parallel processes of its own."""
    num_nodes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Machines that the processes of this worker are dealt out to; on each one headrace-worker is started."""
    node_rank: Annotated[int, Meta(ge=0, le=63)] = 0
    """Which of these machines this is; 0 leads, and its settings hold for all but model, device, threads and share of
    the GPU's memory."""
    group: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    """Name under which the machines of one worker find each other at the broker."""
    group_host: str = ""
    """Address at which the other machines reach this one; empty: that of the way to the broker."""
    group_port: Annotated[int, Meta(ge=0, le=65534)] = 0
    """Port of node 0 for the others, the next one being used too; 0: any two. Tensors take further ports."""
    speculative_tokens: Annotated[int, Meta(ge=0, le=32)] = 0
    """Tokens guessed ahead by prompt lookup and verified at once (CPU, one pipeline stage); 0: none. Fewer iterations
    where answers repeat what was said before. The answers are the same with compiled kernels; torch's own products may
    round differently for more rows, which can decide between tokens that are about equally likely."""
    max_loras: Annotated[int, Meta(ge=0, le=256)] = 8
    """Most LoRA adapters that are loaded at a time; a further one is refused, none is evicted. 0: none are served."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 64
    """Largest rank of an adapter."""
    lora: tuple[str, ...] = ()
    """Adapters to load at the start, as NAME=FOLDER; requests name them as their model. In PEFT's format."""
    lora_dir: str = ""
    """Folder below which adapters may be loaded while the worker runs; empty: none."""
    engine_module: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_.]*$")] = "headrace_worker.engine_process"
    """Python module that runs as the engine process."""
    load_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Longest time until the engine has loaded the model and generated a token."""
    parked: bool = False
    """Load the model, then wait without taking any work until it is promoted."""
    drain_limit_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    """Longest time that the worker, told to drain or to park, goes on with sequences that nobody else can take over.
    After SIGTERM drain_timeout_s holds instead."""
    hang_timeout_s: Annotated[float, Meta(gt=0)] = 8.0
    """The engine is given up if it finishes no iteration for so long while it has something to compute; later if its
    iterations take long anyway."""

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=self.model,
            served_name=self.served_name,
            device=self.device,
            dtype=self.dtype,
            context=self.context,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            max_sequences=self.max_sequences,
            tokens_per_iteration=self.tokens_per_iteration,
            decode_slowdown=self.decode_slowdown,
            native=self.native,
            num_threads=self.num_threads,
            deterministic=self.deterministic,
            gpu_memory_share=self.gpu_memory_share,
            quantization=self.quantization,
            speculative_tokens=self.speculative_tokens,
            generation_config=self.generation_config,
            max_loras=self.max_loras if self.lora or self.lora_dir else 0,
            max_lora_rank=self.max_lora_rank,
        )
