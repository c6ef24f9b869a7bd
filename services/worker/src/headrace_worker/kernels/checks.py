"""What kernels take for granted, checked by their wrappers: a wrong pointer would corrupt the device's memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_worker.tensor_layout import check_layout


def require(condition: bool, message: str) -> None:
    """ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    *,
    device: torch.device | None = None,
    row_stride: bool = False,
) -> None:
    """ValueError unless it is a tensor of that shape (None: any size), type and device (None: any), contiguous
    (`row_stride`: rows of the first dimension may lie further apart). Reads nothing of the tensor's content."""
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, not on {device}")
    check_layout(name, tensor, shape, dtypes, row_stride=row_stride)
