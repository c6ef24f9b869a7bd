"""Compiled dequantization against the gguf package's, bit for bit, on random blocks."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from headrace_worker.native.dequantize import dequantize
from tests.worker.native_variants import VARIANTS, library

HALVES = {Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q8_0: (0,), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}
"""Where a block has its half-precision numbers: random bytes could be infinite there."""


def random_blocks(kind: Kind) -> NDArray[np.uint8]:
    """[3 rows, 20 blocks, bytes]"""
    random = np.random.default_rng(int(kind))
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (3, 20, size), dtype=np.uint8)
    for place in HALVES[kind]:
        # From subnormal to large.
        numbers = random.standard_normal((3, 20)) * 10.0 ** random.integers(-7, 4, (3, 20))
        blocks[..., place : place + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return blocks


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", list(HALVES), ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(kind: Kind, variant: str) -> None:
    blocks = random_blocks(kind)
    values = dequantize(blocks, int(kind), gguf.GGML_QUANT_SIZES[kind][0], library(variant))
    assert values is not None
    assert np.array_equal(values, gguf.quants.dequantize(blocks.reshape(3, -1), kind))


def test_other_types_are_left_to_the_gguf_package() -> None:
    block_size, size = gguf.GGML_QUANT_SIZES[Kind.Q5_0]
    blocks = np.zeros((1, 1, size), dtype=np.uint8)
    assert dequantize(blocks, int(Kind.Q5_0), block_size, library("native")) is None
