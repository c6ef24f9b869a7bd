"""Values of GGUF's quantized tensors, many times faster than numpy computes them: loading a model is mostly this."""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_worker.native.library import Library, loaded


def dequantize(
    blocks: NDArray[np.uint8], kind: int, block_values: int, library: Library | None = None
) -> NDArray[np.float32] | None:
    """blocks [..., blocks, bytes of a block] of the GGUF type numbered `kind`, with `block_values` each -> float32
    [..., values], bit for bit what gguf-py computes. None: no kernel is loaded for that."""
    kernels = library or loaded()
    if kernels is None or not blocks.flags.c_contiguous:
        return None
    *rows, num_blocks, _ = blocks.shape
    values = np.empty((*rows, num_blocks * block_values), dtype=np.float32)
    is_known = kernels.functions.headrace_dequantize(
        blocks.ctypes.data, values.size // block_values, kind, values.ctypes.data, torch.get_num_threads()
    )
    return values if is_known else None
