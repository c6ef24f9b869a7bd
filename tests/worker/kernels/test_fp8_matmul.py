"""Products of 8-bit floats."""

import pytest
import torch

from headrace_worker.kernels import quantized_weights as reference
from headrace_worker.kernels.fp8_matmul import fp8_matmul, quantize_rows
from headrace_worker.kernels.quantized_weights import FP8, FP8_MAX, Fp8Weight
from tests.worker.kernels.tensors import random


@pytest.fixture(autouse=True)
def multiplies_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU does not multiply 8-bit floats")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [100, 512])
def test_rows_are_scaled_to_the_whole_range_and_rounded_to_the_nearest(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    rows = random(4, width, dtype=dtype, device=device) * torch.tensor([[1.0], [1e-3], [1e4], [0.0]], device=device)
    rows = rows.to(dtype)
    found, expected = quantize_rows(rows), reference.quantize_fp8(rows)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.float(), expected.values.float())
    assert found.values[:3].float().abs().amax(-1).tolist() == [FP8_MAX] * 3


@pytest.mark.parametrize(("num_rows", "inner", "outputs"), [(3, 128, 40), (2, 2048, 24), (150, 208, 140)])
def test_products_equal_the_reference(device: torch.device, num_rows: int, inner: int, outputs: int) -> None:
    rows = reference.quantize_fp8(random(num_rows, inner, dtype=torch.float32, device=device))
    weight = reference.quantize_fp8(random(outputs, inner, dtype=torch.float32, device=device, seed=1) * 0.05)
    bias = random(outputs, dtype=torch.float32, device=device, seed=2)
    found = fp8_matmul(rows, weight, torch.float16, bias)
    expected = reference.fp8_matmul(rows, weight, torch.float16, bias)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


def test_quantizing_both_sides_costs_a_few_percent(device: torch.device) -> None:
    rows = random(8, 256, dtype=torch.float32, device=device)
    weight = random(32, 256, dtype=torch.float32, device=device, seed=1)
    found = fp8_matmul(quantize_rows(rows), reference.quantize_fp8(weight), torch.float32)
    exact = rows @ weight.t()
    assert float((found - exact).norm() / exact.norm()) < 0.05


def test_refuses_what_it_cannot_multiply(device: torch.device) -> None:
    values, scales = torch.zeros(4, 64, device=device).to(FP8), torch.ones(4, device=device)
    good = Fp8Weight(values, scales)
    with pytest.raises(ValueError, match="weight has the shape"):
        fp8_matmul(good, Fp8Weight(values[:, :32].contiguous(), scales), torch.float16)
    with pytest.raises(ValueError, match="scales has the shape"):
        fp8_matmul(good, Fp8Weight(values, scales[:2]), torch.float16)
    with pytest.raises(ValueError, match=r"rows is torch\.float32"):
        fp8_matmul(Fp8Weight(values.float(), scales), good, torch.float16)
    with pytest.raises(ValueError, match=r"results of torch\.int8"):
        fp8_matmul(good, good, torch.int8)
