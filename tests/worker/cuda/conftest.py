"""Kernels as in the kernels' own tests: on the GPU where there is one, and under Triton's interpreter elsewhere."""

from importlib.util import find_spec

from tests.worker.kernels.conftest import quiet_arithmetic  # sets the interpreter up before anything imports triton

__all__ = ["quiet_arithmetic"]

collect_ignore_glob = [] if find_spec("triton") else ["test_kernel_*.py"]
