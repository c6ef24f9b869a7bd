"""Settings of the timing-model engine, part of the worker's own."""

from typing import Annotated, Literal

from msgspec import Meta

from headrace_shared.common_settings import CommonSettings


class TimingSettings(CommonSettings, frozen=True, kw_only=True):
    engine: Literal["model", "timing"] = "model"
    """model computes tokens; timing takes the time that a GPU would and gives tokens that mean nothing."""
    gpu: str = "h100"
    """With engine timing: the GPU whose time is taken, such as l4, a100, h100 or h200."""
    gpu_model: str = "llama-3.1-8b"
    """With engine timing: the model whose time is taken on that GPU, on tensor_parallel of them, with the weights'
    bits by quantization. Name, tokenizer and chat template are those of the setting model."""
    workers: Annotated[int, Meta(ge=1, le=1000)] = 1
    """With engine timing: workers in this process, each with an id, a connection and a lease of its own."""
    timing_output_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """With engine timing: mean length of answers that may end before max_tokens; 0: none does."""
    timing_load_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """With engine timing: how long loading takes."""
    timing_slowdown: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """With engine timing: iterations take so many times as long."""
    timing_crash_after: Annotated[int, Meta(ge=0)] = 0
    """With engine timing: the engine dies after so many tokens; 0: never."""
    timing_hang_after: Annotated[int, Meta(ge=0)] = 0
    """With engine timing: the engine hangs after so many tokens; 0: never."""
