"""What the kernels take for granted, checked before they are called: a wrong pointer would be fatal to the process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_worker.tensor_layout import check_layout

ELEMENT_TYPES = (torch.float32, torch.bfloat16)


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], *, row_stride: bool = False
) -> None:
    """ValueError unless it is a CPU tensor of that shape (None: any size) and type, contiguous (`row_stride`: rows of
    the first dimension may lie further apart)."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}, not on the CPU")
    check_layout(name, tensor, shape, dtypes, row_stride=row_stride)


def check_multiple(name: str, value: int, factor: int) -> None:
    if value < 1 or value % factor:
        raise ValueError(f"{name} is {value}, not a positive multiple of {factor}")


def check_range(name: str, values: Tensor, end: int) -> None:
    """ValueError unless all are in [0, end)."""
    if values.numel():
        low, high = values.aminmax()
        if int(low) < 0 or int(high) >= end:
            raise ValueError(f"{name} reaches from {int(low)} to {int(high)}, not within [0, {end})")
