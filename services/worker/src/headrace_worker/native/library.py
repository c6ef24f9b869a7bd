"""The compiled kernels as a ctypes library that shares torch's threads. ctypes releases the GIL during calls."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace_worker.native.build import built_library
from headrace_worker.native.errors import NativeUnavailable

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_INT = ctypes.c_int

_SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "headrace_initialize": ([_POINTER] * 3, None),
    "headrace_matmul_kind": ([], ctypes.c_char_p),
    "headrace_pack": ([_POINTER, _SIZE, _SIZE, _POINTER, _INT], None),
    "headrace_block_bytes": ([_INT], _SIZE),
    "headrace_quantize": ([_POINTER, _SIZE, _SIZE, _INT, _POINTER, _INT], ctypes.c_double),
    "headrace_dequantize": ([_POINTER, _SIZE, _INT, _POINTER, _INT], _INT),
    "headrace_linear": ([_POINTER, _SIZE, _SIZE, _POINTER, _INT, _SIZE, _POINTER, _POINTER, _INT], None),
    "headrace_attention": ([_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _INT, _INT], None),
    "headrace_rms_norm": ([_POINTER, _POINTER, _SIZE, _SIZE, ctypes.c_float, _POINTER, _INT, _INT], None),
    "headrace_rotate_and_write": (
        [_POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _INT, _INT],
        None,
    ),
    "headrace_silu_mul": ([_POINTER, _SIZE, _SIZE, _POINTER, _INT, _INT], None),
    "headrace_argmax": ([_POINTER, _SIZE, _SIZE, _POINTER, _INT, _INT], None),
    "headrace_draw": ([_POINTER, _SIZE, _SIZE, *[_POINTER] * 6, _INT], None),
    "headrace_model_new": ([_POINTER] * 6, _POINTER),
    "headrace_model_free": ([_POINTER], None),
    "headrace_model_run": ([_POINTER, _POINTER, _POINTER, _POINTER, _INT], None),
}


class Library:
    """The kernels' entry points, as attributes by their C names."""

    def __init__(self, path: Path) -> None:
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (arguments, result) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.argtypes = list(arguments)
                function.restype = result
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"cannot load {path}: {error}") from error
        self.functions.headrace_initialize(*_openmp_functions())

    @property
    def matmul_kind(self) -> str:
        """Which instructions multiply bfloat16: amx, avx512_bf16 or portable."""
        kind: bytes = self.functions.headrace_matmul_kind()
        return kind.decode()


@functools.cache
def load() -> Library:
    """Compiles if need be, and loads once per process. Raises NativeUnavailable."""
    return Library(built_library())


def loaded() -> Library | None:
    """The kernels if this process has them already: for what can do without."""
    return load() if load.cache_info().currsize else None


def _openmp_functions() -> list[ctypes.c_void_p]:
    """The entry points of the OpenMP library that torch itself calls.

    The kernels are not linked to an OpenMP library: theirs could be another one than torch's, with a second pool of
    threads on the same cores.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    # Names are looked up as torch's own references are: first what was preloaded, then torch's libraries.
    for library in (ctypes.CDLL(None), ctypes.CDLL(str(_torch_library()))):
        try:
            return [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names]
        except AttributeError:
            continue
    raise NativeUnavailable("torch's OpenMP library lacks GOMP_parallel")


def _torch_library() -> Path:
    return Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
