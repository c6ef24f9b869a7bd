"""One way in which the engine calls a kernel, described well enough to compile it without a GPU."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_worker.kernels.jit import Kernel


class Specialization(NamedTuple):
    name: str
    kernel: Kernel
    signature: Mapping[str, str]
    """Argument -> Triton type: "*bf16", "i32", "fp32" …; without the constants."""
    constexprs: Mapping[str, Any]
    options: Mapping[str, int] = {}
    """num_warps, num_stages, maxnreg."""
    matrix: Mapping[int, str] = {}
    """Compute capability (80, 90, 100) -> the matrix instruction that its PTX must contain. Missing: none is asked."""
    attributes: Mapping[str, int] = {}
    """Argument -> what its value (address in bytes) is known to be divisible by. Pointers are 16 unless said."""
    capabilities: tuple[int, ...] = (80, 90, 100)
    """Where it is used at all."""
