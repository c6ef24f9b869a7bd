"""The engine that is measured, as a worker would build it, on random weights."""

from benchmarks.gpu.measuring import DEVICE, DTYPE, IS_DRY
from benchmarks.gpu.shapes import RandomWeights, card
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.device import CudaDevice, Device, HostDevice
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.cuda.triton_backend import triton_backend
from headrace_worker.models.config import ModelConfig


def random_engine(config: ModelConfig, sizes: Sizes, *, deterministic: bool = False) -> CudaEngine:
    device: Device = HostDevice() if IS_DRY else CudaDevice(DEVICE)
    return build_engine(
        config,
        RandomWeights(config, DEVICE),
        triton_backend(device, deterministic=deterministic),
        sizes,
        lambda context: card(context, config.vocab_size),
        dtype=DTYPE,
        report=lambda what, done, total: None,
    )
