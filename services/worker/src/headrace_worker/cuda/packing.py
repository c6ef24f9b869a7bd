"""Linear layers on a CUDA device, as kernels want their weights. Without any of these, cuBLAS multiplies."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.kernels.fp8_matmul import fp8_matmul, quantize_rows
from headrace_worker.kernels.int_matmul import int_matmul
from headrace_worker.kernels.matmul import INPUT_STEP, matmul
from headrace_worker.kernels.quantized_weights import Fp8Weight, quantize_fp8, quantize_int4, quantize_int8
from headrace_worker.kernels.rows import WIDEST_ROW
from headrace_worker.models.linear import Linear

INT4_GROUP = 64
"""Inputs that share a scale."""
STEP = 32
"""Matrices whose number of inputs is no multiple of this stay as they are."""


class InvariantPacking:
    """Leaves weights as they are; each output is summed up in the same order whatever the number of rows."""

    folds_norms = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Raises ConfigError for a matrix that the kernel does not take."""
        if weight.shape[1] % INPUT_STEP:
            raise ConfigError("deterministic", f"{weight.shape[1]} inputs are no multiple of {INPUT_STEP}")
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

    def bits(self, num_outputs: int, num_inputs: int) -> float | None:
        """A `WeightBits`."""
        match self._kind_of(num_outputs, num_inputs):
            case None:
                return None
            case "int4":
                return 4 + (32 + 8) / INT4_GROUP
            case _:
                return 8 + 32 / num_inputs

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Raises ConfigError for a matrix that the kernels do not take."""
        num_outputs, num_inputs = weight.shape
        match self._kind_of(num_outputs, num_inputs):
            case None:
                return partial(F.linear, weight=weight, bias=bias)
            case "fp8":
                if num_inputs > WIDEST_ROW:
                    raise ConfigError("quantization", f"fp8 takes at most {WIDEST_ROW} inputs, not {num_inputs}")
                return partial(_fp8_linear, weight=quantize_fp8(weight), bias=bias)
            case "int4":
                return partial(int_matmul, weight=quantize_int4(weight, INT4_GROUP), bias=bias)
            case _:
                return partial(int_matmul, weight=quantize_int8(weight), bias=bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)

    def _kind_of(self, num_outputs: int, num_inputs: int) -> str | None:
        if num_inputs % STEP:
            return None
        if self._kind == "int4" and (num_outputs == self._vocab_size or num_inputs % INT4_GROUP):
            return "int8"
        return self._kind


def _fp8_linear(rows: Tensor, *, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    return fp8_matmul(quantize_rows(rows), weight, rows.dtype, bias)
