"""Products with packed weights on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from headrace_worker.models.linear import make_linear, padded_count

LARGEST = 2048


def test_kernels_are_compiled_for_few_numbers_of_rows() -> None:
    """Each takes half a megabyte, and is kept: a worker's memory must not grow with the variety of its batches."""
    counts = {padded_count(number) for number in range(1, LARGEST + 1)}
    assert len(counts) <= 48
    assert {padded_count(number) for number in counts} == counts


def test_little_is_computed_in_vain() -> None:
    for number in range(1, LARGEST + 1):
        assert number <= padded_count(number) < number + max(4, number / 4), number
    assert all(padded_count(number) == number for number in range(1, 9)), "few rows take the time of the weights"


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_that_are_filled_up_change_nothing(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 40, generator=generator)
    bias = torch.randn(24, generator=generator) if has_bias else None
    linear = make_linear(weight, bias)
    for number in (1, 7, 8, 9, 11, 12, 33, 61, 64, 65, 100, 256, 257, 300):
        rows = torch.randn(number, 40, generator=generator)
        with torch.inference_mode():
            product = linear(rows)
        assert product.shape == (number, 24)
        torch.testing.assert_close(product, F.linear(rows, weight, bias), rtol=1e-4, atol=1e-4)
