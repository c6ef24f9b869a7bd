import pytest
import torch

from headrace_worker.native import reference
from headrace_worker.native.library import Library
from headrace_worker.native.linear import pack_weight, packed_linear
from tests.worker.native_variants import VARIANTS, library


@pytest.fixture(params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


@pytest.mark.parametrize("num_outputs", [1, 16, 100, 576])
@pytest.mark.parametrize("num_inputs", [32, 576, 1536])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 9, 16, 17, 24, 70])
def test_equals_the_reference_up_to_rounding(
    kernels: Library, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    bias = torch.randn(num_outputs, generator=generator).bfloat16()
    product = packed_linear(rows, pack_weight(weight, kernels), bias)
    exact = reference.linear(rows.double(), weight.double(), bias.double())
    # One rounding of the result, and float32 sums of products of this size.
    tolerance = exact.abs() * 2**-8 + num_inputs * 2**-20
    assert ((product.double() - exact).abs() <= tolerance).all()


def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Library) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(70, 576, generator=generator).bfloat16()
    weight = pack_weight(torch.randn(1000, 576, generator=generator).bfloat16(), kernels)
    together = packed_linear(rows, weight)
    for first, last in ((0, 1), (3, 5), (1, 7), (10, 26), (5, 38), (20, 61)):
        assert torch.equal(packed_linear(rows[first:last].contiguous(), weight), together[first:last])


def test_the_number_of_threads_changes_nothing(kernels: Library) -> None:
    rows = torch.randn(5, 64).bfloat16()
    weight = pack_weight(torch.randn(100, 64).bfloat16(), kernels)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = packed_linear(rows, weight)
        torch.set_num_threads(3)
        assert torch.equal(packed_linear(rows, weight), alone)
    finally:
        torch.set_num_threads(threads)


def test_refuses_what_it_cannot_compute() -> None:
    kernels = library("native")
    weight = pack_weight(torch.zeros(16, 64, dtype=torch.bfloat16), kernels)
    rows = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="number of inputs is 48, not a positive multiple of 32"):
        pack_weight(torch.zeros(16, 48, dtype=torch.bfloat16), kernels)
    with pytest.raises(ValueError, match=r"weight is torch\.float32"):
        pack_weight(torch.zeros(16, 64), kernels)
    with pytest.raises(ValueError, match="rows has the shape"):
        packed_linear(rows[:, :32].contiguous(), weight)
    with pytest.raises(ValueError, match="rows is not contiguous"):
        packed_linear(torch.zeros(64, 4, dtype=torch.bfloat16).t(), weight)
    with pytest.raises(ValueError, match="rows is on meta"):
        packed_linear(rows.to("meta"), weight)
    with pytest.raises(ValueError, match="bias has the shape"):
        packed_linear(rows, weight, torch.zeros(15, dtype=torch.bfloat16))
