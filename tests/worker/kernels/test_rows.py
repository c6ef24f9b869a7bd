"""The kernels between the large operations, beside the same in torch."""

import pytest
import torch

from headrace_worker.kernels import reference
from headrace_worker.kernels.rows import Activation, act_mul, rms_norm
from tests.worker.kernels.tensors import close, random

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 576, 4096])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_equals_the_reference(device: torch.device, dtype: torch.dtype, size: int, weighted: bool) -> None:
    rows = random(3, size, dtype=dtype, device=device)
    weight = 1 + random(size, dtype=torch.float32, device=device, seed=1) if weighted else None
    close(rms_norm(rows, weight, epsilon=1e-5), reference.rms_norm(rows, weight, epsilon=1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_rows_to_the_residual_first(device: torch.device, dtype: torch.dtype) -> None:
    rows, residual = (random(5, 100, dtype=dtype, device=device, seed=seed) * 3 for seed in range(2))
    weight = random(100, dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = reference.rms_norm(rows, weight, epsilon=1e-6, residual=expected_residual)
    close(rms_norm(rows, weight, epsilon=1e-6, residual=residual), expected)
    if dtype == torch.bfloat16 and device.type == "cpu":
        close(residual, expected_residual)  # the interpreter rounds to bfloat16 towards zero
    else:
        assert torch.equal(residual, expected_residual)


def test_rms_norm_of_rows_that_lie_apart(device: torch.device) -> None:
    wide = random(4, 96, dtype=torch.float32, device=device)
    close(rms_norm(wide[:, 32:64], None, epsilon=1e-5), reference.rms_norm(wide[:, 32:64], None, epsilon=1e-5))


def test_rms_norm_of_zeros_and_of_large_values(device: torch.device) -> None:
    rows = torch.zeros(2, 64, device=device)
    rows[1] = 1e15
    close(rms_norm(rows, None, epsilon=1e-6), reference.rms_norm(rows, None, epsilon=1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 1536])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_act_mul_equals_the_reference(
    device: torch.device, dtype: torch.dtype, size: int, activation: Activation
) -> None:
    gate_up = random(3, 2 * size, dtype=dtype, device=device) * 5
    gate_up[0, 0], gate_up[0, 1] = 60.0, -60.0
    close(act_mul(gate_up, activation), reference.act_mul(gate_up, activation))


def test_no_rows_are_no_work(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    assert rms_norm(empty, None, epsilon=1e-5).shape == (0, 64)
    assert act_mul(empty, "silu").shape == (0, 32)


def test_refuses_what_it_cannot_compute(device: torch.device) -> None:
    rows = torch.zeros(4, 64, device=device)
    with pytest.raises(ValueError, match="residual has the shape"):
        rms_norm(rows, None, epsilon=1e-5, residual=torch.zeros(3, 64, device=device))
    with pytest.raises(ValueError, match=r"weight is torch\.int64"):
        rms_norm(rows, torch.zeros(64, dtype=torch.int64, device=device), epsilon=1e-5)
    with pytest.raises(ValueError, match="rows is not contiguous"):
        rms_norm(rows.t(), None, epsilon=1e-5)
    with pytest.raises(ValueError, match="rows of 40000"):
        rms_norm(torch.zeros(1, 40000, device=device), None, epsilon=1e-5)
    with pytest.raises(ValueError, match="the width is 63"):
        act_mul(torch.zeros(4, 63, device=device), "silu")
