"""Random tensors for kernels, and how close results are to be."""

import torch
from torch import Tensor


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
