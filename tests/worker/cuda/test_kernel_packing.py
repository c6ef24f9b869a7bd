"""Linear layers by kernels, interpreted: what they make of a weight, and when they leave it alone."""

from functools import partial

import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.cuda.packing import InvariantPacking, QuantizedPacking
from headrace_worker.kernels.quantized_weights import Fp8Weight, IntWeight
from headrace_worker.kernels.rows import WIDEST_ROW

VOCAB_SIZE = 48


def matrices(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_outputs)
    rows = torch.randn(3, num_inputs, generator=generator).half()
    weight = torch.randn(num_outputs, num_inputs, generator=generator).half()
    return rows, weight, torch.randn(num_outputs, generator=generator).half()


def error(product: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> float:
    exact = rows.float() @ weight.float().t() + bias.float()
    return float((product.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("kind", "least", "most"), [("int8", 1e-3, 1e-2), ("int4", 2e-2, 0.15), ("fp8", 1e-2, 0.1)])
def test_products_are_as_exact_as_the_bits_allow(kind: str, least: float, most: float) -> None:
    rows, weight, bias = matrices(32, 64)
    product = QuantizedPacking(kind, VOCAB_SIZE).linear(weight, bias)(rows)
    assert product.dtype == rows.dtype and least < error(product, rows, weight, bias) < most


def test_the_head_keeps_eight_bits() -> None:
    rows, weight, bias = matrices(VOCAB_SIZE, 64)
    assert error(QuantizedPacking("int4", VOCAB_SIZE).linear(weight, bias)(rows), rows, weight, bias) < 1e-2


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_odd_widths_stay_as_they_are(kind: str) -> None:
    rows, weight, bias = matrices(32, 40)
    product = QuantizedPacking(kind, VOCAB_SIZE).linear(weight, bias)(rows)
    assert torch.equal(product, torch.nn.functional.linear(rows, weight, bias))


def test_rows_do_not_depend_on_each_other() -> None:
    rows, weight, bias = matrices(32, 64)
    linear = InvariantPacking().gate_up(weight, bias)
    together = linear(rows)
    assert error(together, rows, weight, bias) < 1e-3
    assert torch.equal(together, torch.cat([linear(row[None]) for row in rows]))


@pytest.mark.parametrize(("kind", "num_outputs"), [("int8", 32), ("int4", 32), ("int4", VOCAB_SIZE), ("fp8", 32)])
def test_the_bits_counted_are_those_that_a_matrix_takes(kind: str, num_outputs: int) -> None:
    packing = QuantizedPacking(kind, VOCAB_SIZE)
    linear = packing.linear(matrices(num_outputs, 128)[1], None)
    assert isinstance(linear, partial)
    weight = linear.keywords["weight"]
    assert isinstance(weight, IntWeight | Fp8Weight)
    num_bytes = sum(part.nbytes for part in weight if isinstance(part, torch.Tensor))
    assert packing.bits(num_outputs, 128) == 8 * num_bytes / (num_outputs * 128)
    assert packing.bits(num_outputs, 40) is None


def test_matrices_that_no_kernel_takes_are_refused_when_they_are_packed() -> None:
    with pytest.raises(ConfigError) as narrow:
        InvariantPacking().linear(torch.zeros(4, 24), None)
    assert narrow.value.key == "deterministic"
    with pytest.raises(ConfigError) as wide:
        QuantizedPacking("fp8", VOCAB_SIZE).linear(torch.zeros(2, WIDEST_ROW + 32), None)
    assert wide.value.key == "quantization"
