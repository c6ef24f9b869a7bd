"""What weights take, counted before they are read."""

from pathlib import Path

import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker import engine, memory
from headrace_worker.models.config import ModelConfig, Rope
from headrace_worker.models.weight_bytes import matrices, packed_bytes
from headrace_worker.native.library import load as load_kernels
from headrace_worker.native.packing import Quantization, make_packing, weight_bits
from tests.worker.checkpoints import load_tiny, save_checkpoint


def config(ties_embeddings: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_epsilon=1e-5,
        rope=Rope(theta=10_000.0),
        context=128,
        attention_scale=0.25,
        ties_embeddings=ties_embeddings,
        has_qkv_bias=True,
    )


def test_weights_that_are_left_as_they_are_take_what_the_parameters_do() -> None:
    untied, tied = config(False), config(True)
    assert packed_bytes(untied, 2, lambda num_outputs, num_inputs: None) == 2 * untied.num_parameters
    # The head is a copy.
    assert packed_bytes(tied, 2, lambda num_outputs, num_inputs: 16) == 2 * (tied.num_parameters + 160 * 64)


@pytest.mark.parametrize("kind", [Quantization.INT8, Quantization.INT4])
def test_the_bits_counted_on_a_cpu_are_those_that_a_matrix_takes(kind: Quantization) -> None:
    bits = weight_bits(kind, 160)
    assert bits is not None
    packing = make_packing(load_kernels(), kind, 160)
    for matrix in matrices(config(False)):
        packed = packing.linear(torch.randn(matrix.num_outputs, matrix.num_inputs), None).weight
        each = bits(matrix.num_outputs, matrix.num_inputs)
        assert each is not None
        assert packed.data.nbytes == matrix.num_outputs * matrix.num_inputs * each / 8


def test_a_model_that_fits_only_in_fewer_bits_is_refused_in_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, hidden_size=128, intermediate_size=128, num_attention_heads=4)
    monkeypatch.setattr(engine, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 700_000)
    sizes = {"dtype": "bfloat16", "num_blocks": 2}
    with pytest.raises(ConfigError, match="weights"):
        load_tiny(tmp_path, **sizes)
    load_tiny(tmp_path, quantization="int4", **sizes)
