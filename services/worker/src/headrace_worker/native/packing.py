"""The decoder's matrices in the kernels' layout: in bfloat16, or in 8 or 4 bits."""

from enum import StrEnum

from torch import Tensor

from headrace_worker.huge_pages import Arena
from headrace_worker.native.library import Library
from headrace_worker.native.linear import WeightFormat
from headrace_worker.native.model import NativeMatrix, pack, pack_gate_up


class Quantization(StrEnum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


class NativePacking:
    """A `Packing` (models/decoder_weights.py)."""

    def __init__(self, kernels: Library, quantization: Quantization, vocab_size: int) -> None:
        self._kernels = kernels
        self._arena = Arena()
        self._vocab_size = vocab_size
        self._format = {
            Quantization.NONE: WeightFormat.BF16,
            Quantization.INT8: WeightFormat.INT8,
            Quantization.INT4: WeightFormat.INT4,
        }[quantization]

    @property
    def folds_norms(self) -> bool:
        """Groups of inputs share a scale, so their weights had better be of one size."""
        return self._format == WeightFormat.BF16

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        format = self._format
        if format == WeightFormat.INT4 and weight.shape[0] == self._vocab_size:
            # The head decides between tokens: what 4 bits lose there cannot be made good by a later layer.
            format = WeightFormat.INT8
        return pack(weight.contiguous(), bias, self._kernels, self._arena, format=format)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return pack_gate_up(weight.contiguous(), bias, self._kernels, self._arena, format=self._format)
