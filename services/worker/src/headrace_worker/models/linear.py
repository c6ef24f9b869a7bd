"""Linear layers, with weights in the layout that the device multiplies fastest."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out]"""

_TYPICAL_ROWS = 32
"""oneDNN chooses the packing for this many rows; measured good from 1 to 256."""
_STEPS = ((8, 1), (32, 4), (64, 8), (128, 16), (512, 32))
"""Up to so many rows: what their number is filled up to a multiple of."""
_LAST_STEP = 128


def padded_count(num_rows: int) -> int:
    """To how many rows a product's are filled up. oneDNN compiles a kernel, of some hundred kilobytes with all that
    belongs to it, for each number of rows that it meets, and keeps it: batches have any number, these are few."""
    step = next((step for most, step in _STEPS if num_rows <= most), _LAST_STEP)
    return -(-num_rows // step) * step


class TorchPacking:
    """`folds_norms`: saves a multiplication in each norm, and costs a tied head a matrix of its own."""

    def __init__(self, *, folds_norms: bool) -> None:
        self.folds_norms = folds_norms

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias)


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """`weight` is [out, in]. On CPUs it is packed once: F.linear packs at each call, up to half of its time."""
    if weight.device.type == "cpu" and weight.dtype != torch.float16 and _can_pack():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise

        def packed_linear(rows: Tensor) -> Tensor:
            count = rows.shape[0]
            missing = padded_count(count) - count
            filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            product: Tensor = multiply(filled, packed, bias, "none", [], "")
            return product[:count] if missing else product

        return packed_linear

    def plain_linear(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    return plain_linear


def _can_pack() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
