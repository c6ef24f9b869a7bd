import math

import pytest
import torch
from torch import Tensor

from headrace_worker.native import reference
from headrace_worker.native.library import Library
from headrace_worker.native.rows import argmax, rms_norm, rotate_and_write, silu_mul
from tests.worker.native_variants import VARIANTS, library

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [7, 64, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_the_reference(kernels: Library, dtype: torch.dtype, size: int) -> None:
    rows = _random(5, size, dtype=dtype)
    _close(rms_norm(rows, epsilon=1e-5, library=kernels), reference.rms_norm(rows, epsilon=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_rows_to_the_residual_first(kernels: Library, dtype: torch.dtype) -> None:
    rows, residual = _random(5, 100, dtype=dtype), _random(5, 100, dtype=dtype) * 3
    expected_residual = residual.clone()
    expected = reference.rms_norm(rows, epsilon=1e-5, residual=expected_residual)
    _close(rms_norm(rows, epsilon=1e-5, residual=residual, library=kernels), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotates_in_place_and_writes_to_the_pages(kernels: Library, dtype: torch.dtype, block_size: int) -> None:
    num_heads, num_kv_heads, head_dim = 9, 3, 64
    qkv = _random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = torch.randn(4, head_dim // 2)
    rotations = torch.complex(angles.cos(), angles.sin())
    pages = torch.zeros(6, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    blocks, offsets = torch.tensor([5, 0, 2, 2]), torch.tensor([15, 0, 3, 4])
    slots = (blocks * 2 * num_kv_heads * block_size + offsets)[:, None] + torch.arange(2 * num_kv_heads) * block_size
    expected_qkv, expected_pages = qkv.clone(), pages.clone()
    reference.rotate_and_write(expected_qkv, rotations, slots, expected_pages)
    rotate_and_write(qkv, rotations, slots, pages, library=kernels)
    _close(qkv[:, :num_heads], expected_qkv[:, :num_heads])
    _close(pages, reference.values_paired(expected_pages))
    assert torch.count_nonzero(pages).item() == torch.count_nonzero(expected_pages).item()


@pytest.mark.parametrize("size", [5, 96, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_the_reference(kernels: Library, dtype: torch.dtype, size: int) -> None:
    gate_up = _random(3, 2 * size, dtype=dtype) * 5
    _close(silu_mul(gate_up, library=kernels), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_is_the_first_greatest_one(kernels: Library, dtype: torch.dtype) -> None:
    logits = _random(40, 1003, dtype=dtype)
    logits[3, [17, 900]] = 100.0
    logits[4, 1002] = 100.0
    logits[5] = -math.inf
    found = argmax(logits, library=kernels)
    assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_argmax_finds_nan(kernels: Library) -> None:
    logits = _random(1, 200, dtype=torch.bfloat16)
    logits[0, [70, 150]] = math.nan
    logits[0, 20] = math.inf
    assert argmax(logits, library=kernels).tolist() == [70]


def test_refuses_what_it_cannot_compute() -> None:
    kernels = library("native")
    rows = torch.zeros(4, 64)
    with pytest.raises(ValueError, match="residual has the shape"):
        rms_norm(rows, epsilon=1e-5, residual=torch.zeros(3, 64), library=kernels)
    with pytest.raises(ValueError, match="width is 63"):
        silu_mul(torch.zeros(4, 63), library=kernels)
    with pytest.raises(ValueError, match=r"logits is torch\.float64"):
        argmax(rows.double(), library=kernels)
    pages = torch.zeros(2, 2, 1, 16, 64)
    qkv, rotations = torch.zeros(1, 3, 64), torch.zeros(1, 32, dtype=torch.complex64)
    with pytest.raises(ValueError, match="slots reaches"):
        rotate_and_write(qkv, rotations, torch.tensor([[50, 66]]), pages, library=kernels)
    with pytest.raises(ValueError, match="a block apart"):
        rotate_and_write(qkv, rotations, torch.tensor([[0, 17]]), pages, library=kernels)
