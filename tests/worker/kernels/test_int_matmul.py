"""Products with weights of 8 and 4 bits."""

import pytest
import torch

from headrace_worker.kernels import quantized_weights as reference
from headrace_worker.kernels.int_matmul import int_matmul, num_splits
from headrace_worker.kernels.quantized_weights import IntWeight, dequantized, pack_int4, quantize_int4, quantize_int8
from tests.worker.kernels.tensors import random


def close(device: torch.device, weight: IntWeight, num_tokens: int, dtype: torch.dtype, biased: bool = False) -> None:
    rows = random(num_tokens, weight.inputs, dtype=dtype, device=device)
    bias = random(weight.values.shape[0], dtype=dtype, device=device, seed=5) if biased else None
    expected = reference.int_matmul(rows, weight, bias)
    torch.testing.assert_close(int_matmul(rows, weight, bias), expected, rtol=1e-2, atol=1e-2)


def some_weight(device: torch.device, outputs: int, inputs: int) -> torch.Tensor:
    return random(outputs, inputs, dtype=torch.float32, device=device, seed=3) * 0.05 + 0.01


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_equal_the_reference(device: torch.device, group: int) -> None:
    close(device, quantize_int4(some_weight(device, 40, 256), group), 3, torch.float16)


@pytest.mark.parametrize("group", [None, 96])
def test_eight_bits_equal_the_reference(device: torch.device, group: int | None) -> None:
    close(device, quantize_int8(some_weight(device, 40, 192), group), 3, torch.float16)


@pytest.mark.parametrize("bits", [4, 8])
def test_in_bfloat16_with_a_bias_over_several_tiles(device: torch.device, bits: int) -> None:
    weight = some_weight(device, 140, 128)
    quantized = quantize_int4(weight, 64) if bits == 4 else quantize_int8(weight)
    close(device, quantized, 150, torch.bfloat16, biased=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_of_a_long_inner_dimension_are_added(device: torch.device, bits: int) -> None:
    weight = some_weight(device, 24, 512)
    quantized = quantize_int4(weight, 32) if bits == 4 else quantize_int8(weight, 32)
    assert num_splits(24, 512 // 32) == 4
    close(device, quantized, 2, torch.float16, biased=True)


def test_packing_keeps_every_value(device: torch.device) -> None:
    values = torch.randint(0, 16, (5, 128), dtype=torch.uint8, device=device)
    ones = torch.ones(5, 4, device=device)
    weight = IntWeight(pack_int4(values, 32), ones, torch.zeros_like(ones, dtype=torch.uint8), 32)
    assert torch.equal(dequantized(weight), values.float())


@pytest.mark.parametrize("group", [32, 128])
def test_quantization_errs_by_half_a_step_at_most(device: torch.device, group: int) -> None:
    weight = some_weight(device, 16, 256)
    for quantized in (quantize_int4(weight, group), quantize_int8(weight, group)):
        steps = quantized.scales.repeat_interleave(group, dim=1)
        # The zero point is rounded as well.
        assert ((dequantized(quantized) - weight).abs() <= steps * (1.01 if quantized.bits == 4 else 0.51)).all()


def test_refuses_what_it_cannot_multiply(device: torch.device) -> None:
    rows = torch.zeros(2, 256, dtype=torch.float16, device=device)
    weight = quantize_int4(some_weight(device, 8, 256), 64)
    with pytest.raises(ValueError, match="rows is torch"):
        int_matmul(rows.float(), weight)
    with pytest.raises(ValueError, match="without zero points"):
        int_matmul(rows, weight._replace(zeros=None))
    with pytest.raises(ValueError, match="groups of 100"):
        int_matmul(rows, weight._replace(group=100))
    with pytest.raises(ValueError, match="scales has the shape"):
        int_matmul(rows, weight._replace(scales=weight.scales[:, :1].contiguous()))
    with pytest.raises(ValueError, match="groups of 256 in 4 bits"):
        int_matmul(rows, weight._replace(group=256, scales=weight.scales[:, :1].contiguous()))
