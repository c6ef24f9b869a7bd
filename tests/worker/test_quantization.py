"""Weights of 8 and 4 bits: what they stand for, and that a product of theirs does not depend on the batch."""

import math

import pytest
import torch
from torch import Tensor

from headrace_worker.native.library import Library
from headrace_worker.native.linear import PackedWeight, WeightFormat, packed_linear, quantize_weight
from headrace_worker.native.packing import LOSSLESS
from tests.worker.native_variants import VARIANTS, library

CODED = [WeightFormat.INT8, WeightFormat.INT4]


@pytest.fixture(params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def values_of(weight: PackedWeight) -> Tensor:
    """[outputs, inputs]: each product with a unit vector is one weight, and exact."""
    return packed_linear(torch.eye(weight.num_inputs).bfloat16(), weight).t()


def test_eight_bits_are_within_half_a_step(kernels: Library) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = values_of(quantize_weight(weight.float(), WeightFormat.INT8, kernels).weight).float()
    steps = weight.float().view(40, -1, 32).abs().amax(-1).repeat_interleave(32, dim=1) / 127
    assert ((values - weight.float()).abs() <= 0.502 * steps + values.abs() * 2**-8).all()


def test_four_bits_lose_no_more_than_the_range_demands(kernels: Library) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = values_of(quantize_weight(weight.float(), WeightFormat.INT4, kernels).weight).float()
    groups = weight.float().view(40, -1, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (values - weight.float()).view(40, -1, 32).square().mean(-1)
    # Even rounding over the whole range loses step² / 12 on average; the search must do better than that.
    assert float(error.mean()) < float((step.square() / 12).mean())


@pytest.mark.parametrize("offset", [0.0, -8.0, 1.0])
@pytest.mark.parametrize("num_codes", [9, 12, 16])
def test_four_bits_are_found_where_they_are_enough(kernels: Library, num_codes: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(num_codes)
    codes = torch.randint(0, num_codes, (20, 64), generator=generator).float()
    scales = torch.rand(20, 2, generator=generator).half().float().repeat_interleave(32, dim=1) / 64
    values = scales * (codes + offset)
    assert quantize_weight(values, WeightFormat.INT4, kernels).error < LOSSLESS
    noisy = values + scales * 0.1 * torch.randn(20, 64, generator=generator)
    assert quantize_weight(noisy, WeightFormat.INT4, kernels).error > LOSSLESS


@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(kernels: Library, format: WeightFormat, number: float) -> None:
    """It would become a 0 that nobody hears of, and the rest of the matrix would count as without loss."""
    weight = torch.randn(40, 128)
    weight[17, 70] = number
    with pytest.raises(ValueError, match="not finite"):
        quantize_weight(weight, format, kernels)


@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (50, 96)])
def test_quantizing_what_is_quantized_already_changes_nothing(
    kernels: Library, shape: tuple[int, int], format: WeightFormat
) -> None:
    # Powers of two and few code bits: every value is a bfloat16 number.
    codes = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(3))
    codes[:, ::32], codes[:, 1::32] = (127, -127) if format is WeightFormat.INT8 else (0, 15)
    minimum = 0.0 if format is WeightFormat.INT8 else -0.75
    values = (0.125 * codes + minimum).bfloat16()
    assert torch.equal(values_of(quantize_weight(values.float(), format, kernels).weight), values)


@pytest.mark.parametrize("format", CODED)
def test_equal_weights_stay_equal(kernels: Library, format: WeightFormat) -> None:
    for value in (0.0, 0.5, -3.0):
        weight = torch.full((3, 32), value).bfloat16()
        assert torch.equal(values_of(quantize_weight(weight.float(), format, kernels).weight), weight)


@pytest.mark.parametrize("format", CODED)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Library, format: WeightFormat) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(70, 160, generator=generator).bfloat16()
    weight = quantize_weight(torch.randn(300, 160, generator=generator), format, kernels).weight
    together = packed_linear(rows, weight)
    for first, last in ((0, 1), (3, 5), (1, 7), (10, 26), (5, 38), (20, 61)):
        assert torch.equal(packed_linear(rows[first:last].contiguous(), weight), together[first:last])


@pytest.mark.parametrize("format", CODED)
def test_products_are_those_of_the_values(kernels: Library, format: WeightFormat) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(40, 96, generator=generator).bfloat16()
    weight = quantize_weight(torch.randn(90, 96, generator=generator), format, kernels).weight
    exact = rows.double() @ values_of(weight).double().t()
    assert ((packed_linear(rows, weight).double() - exact).abs() <= exact.abs() * 2**-8 + 2**-14).all()
