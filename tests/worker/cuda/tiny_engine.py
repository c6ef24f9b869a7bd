"""The GPU engine on a tiny checkpoint, with torch in the place of its kernels."""

from pathlib import Path
from typing import Any

import torch

from headrace_shared.fleet_messages import ModelCard
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import DeviceMemory, Sizes
from headrace_worker.models.checkpoint import open_checkpoint
from tests.worker.cuda.torch_backend import torch_backend


def build(folder: Path, memory: DeviceMemory | None = None, peak_bytes: int = 0, **changes: Any) -> CudaEngine:
    checkpoint = open_checkpoint(folder)
    sizes = Sizes(
        context=128, block_size=8, num_blocks=64, max_sequences=6, tokens_per_iteration=32, memory_share=0.9
    )._replace(**changes)

    def make_card(context: int) -> ModelCard:
        return checkpoint.make_card("tiny", context)

    return build_engine(
        checkpoint.config,
        checkpoint.source,
        torch_backend(memory, peak_bytes),
        sizes,
        make_card,
        dtype=torch.float32,
        report=lambda what, done, total: None,
    )
