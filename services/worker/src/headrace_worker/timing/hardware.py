"""GPUs as a roofline sees them: how fast they multiply, how fast they read, how much they hold.

Figures are those of the vendor's data sheets: dense bfloat16 tensor throughput (sheets that give the one with sparsity
give twice as much), memory bandwidth and capacity of one GPU.

    A100   NVIDIA A100 Tensor Core GPU data sheet (2021)       L4     NVIDIA L4 data sheet (2023)
    H100   NVIDIA H100 Tensor Core GPU data sheet (2023)       L40S   NVIDIA L40S data sheet (2023)
    H200   NVIDIA H200 Tensor Core GPU data sheet (2024)       A10    NVIDIA A10 data sheet (2021)
    B200   NVIDIA DGX B200 data sheet (2024), an eighth of the system
"""

from typing import NamedTuple

from headrace_shared.errors import ConfigError

GB = 10**9


class Gpu(NamedTuple):
    name: str
    flops: float
    """Dense bfloat16 floating-point operations a second."""
    bandwidth: float
    """Bytes of memory a second."""
    memory: int
    """Bytes."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a10", 125e12, 600e9, 24 * GB),
        Gpu("a100-40g", 312e12, 1555e9, 40 * GB),
        Gpu("a100", 312e12, 2039e9, 80 * GB),
        Gpu("l4", 121e12, 300e9, 24 * GB),
        Gpu("l40s", 362e12, 864e9, 48 * GB),
        Gpu("h100", 989e12, 3350e9, 80 * GB),
        Gpu("h200", 989e12, 4800e9, 141 * GB),
        Gpu("b200", 2250e12, 8000e9, 180 * GB),
    )
}


def find_gpu(name: str, key: str = "gpu") -> Gpu:
    """Raises ConfigError naming `key`."""
    gpu = GPUS.get(name)
    if gpu is None:
        raise ConfigError(key, f"{name!r} is none of {', '.join(GPUS)}")
    return gpu
