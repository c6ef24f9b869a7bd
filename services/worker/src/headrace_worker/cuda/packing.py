"""Linear layers on a CUDA device, as kernels want their weights. Without any of these, cuBLAS multiplies."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from headrace_worker.kernels.fp8_matmul import fp8_matmul, quantize_rows
from headrace_worker.kernels.int_matmul import int_matmul
from headrace_worker.kernels.matmul import matmul
from headrace_worker.kernels.quantized_weights import Fp8Weight, quantize_fp8, quantize_int4, quantize_int8
from headrace_worker.models.linear import Linear

INT4_GROUP = 64
"""Inputs that share a scale."""
STEP = 32
"""Matrices whose number of inputs is no multiple of this stay as they are."""


class InvariantPacking:
    """Leaves weights as they are; each output is summed up in the same order whatever the number of rows."""

    folds_norms = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return partial(matmul, weight=weight, bias=bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)


class QuantizedPacking:
    """Weights in fewer bits. `kind`: int8 (a scale for each output), int4 (scale and zero point for each group of
    inputs; the head in int8, where the last bits decide between tokens) or fp8 (activations too)."""

    folds_norms = False

    def __init__(self, kind: str, vocab_size: int) -> None:
        self._kind = kind
        self._vocab_size = vocab_size

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        num_outputs, num_inputs = weight.shape
        if num_inputs % STEP:
            return partial(F.linear, weight=weight, bias=bias)
        if self._kind == "fp8":
            return partial(_fp8_linear, weight=quantize_fp8(weight), bias=bias)
        if self._kind == "int4" and num_outputs != self._vocab_size and not num_inputs % INT4_GROUP:
            return partial(int_matmul, weight=quantize_int4(weight, INT4_GROUP), bias=bias)
        return partial(int_matmul, weight=quantize_int8(weight), bias=bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)


def _fp8_linear(rows: Tensor, *, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    return fp8_matmul(quantize_rows(rows), weight, rows.dtype, bias)
