"""What compiled code takes for granted of a tensor, whatever device it is on."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_layout(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], *, row_stride: bool
) -> None:
    """ValueError unless it has that shape (None: any size) and type and is contiguous (`row_stride`: rows of the first
    dimension may lie further apart). Reads nothing of the tensor's content."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
    if tensor.dim() != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]")
    contiguous = tensor.is_contiguous()
    if not contiguous and row_stride and tensor.shape[0] > 1:
        contiguous = tensor[0].is_contiguous() and tensor.stride(0) >= tensor[0].numel()
    if not contiguous:
        raise ValueError(f"{name} is not contiguous")
