"""The product for the deterministic mode: right, and the same for a row whatever the others are."""

import pytest
import torch

from headrace_worker.kernels.matmul import Tiling, matmul
from tests.worker.kernels.tensors import random

SMALL = Tiling(rows=16, columns=32, inner=16, segment=64, num_warps=4)
"""The interpreter takes its time."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "inner", "columns"), [(3, 64, 40), (5, 144, 40), (18, 144, 40)])
def test_equals_the_product_in_float64(
    device: torch.device, dtype: torch.dtype, num_rows: int, inner: int, columns: int
) -> None:
    rows, weight = (random(size, inner, dtype=dtype, device=device, seed=size) for size in (num_rows, columns))
    bias = random(columns, dtype=dtype, device=device)
    expected = rows.double() @ weight.double().t() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    found = matmul(rows, weight, bias, tiling=SMALL)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * inner**0.5)
    without = matmul(rows, weight, tiling=SMALL).double()
    torch.testing.assert_close(without, expected - bias.double(), rtol=tolerance, atol=tolerance * inner**0.5)


def test_a_row_has_the_same_bits_alone_among_few_and_among_many(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = random(41, 320, dtype=dtype, device=device)
    weight = random(48, 320, dtype=dtype, device=device, seed=1)
    whole = matmul(rows, weight, tiling=SMALL)
    assert torch.equal(matmul(rows[:1], weight, tiling=SMALL), whole[:1])
    assert torch.equal(matmul(rows[20:34], weight, tiling=SMALL), whole[20:34])
    order = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    assert torch.equal(matmul(rows[order], weight, tiling=SMALL), whole[order])


def test_rows_may_lie_apart(device: torch.device) -> None:
    wide = random(4, 160, dtype=torch.float32, device=device)
    weight = random(20, 64, dtype=torch.float32, device=device, seed=1)
    torch.testing.assert_close(matmul(wide[:, 32:96], weight), wide[:, 32:96] @ weight.t(), rtol=1e-5, atol=1e-4)


def test_refuses_what_it_cannot_multiply(device: torch.device) -> None:
    rows = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="weight has the shape"):
        matmul(rows, torch.zeros(8, 32, device=device))
    with pytest.raises(ValueError, match="40 inputs"):
        matmul(torch.zeros(2, 40, device=device), torch.zeros(8, 40, device=device))
    with pytest.raises(ValueError, match="weight is torch"):
        matmul(rows, torch.zeros(8, 64, device=device, dtype=torch.float16))
    assert matmul(rows[:0], torch.zeros(8, 64, device=device)).shape == (0, 8)
