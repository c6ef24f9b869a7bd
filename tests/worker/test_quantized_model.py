"""The compiled forward pass with quantized weights, on tiny random checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_shared.errors import ConfigError
from headrace_worker import forward
from tests.worker.checkpoints import prompt_of, save_checkpoint
from tests.worker.native_variants import VARIANTS, library
from tests.worker.tiny_native import SIZES, error, load_tiny, slice_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


@pytest.fixture(params=list(VARIANTS), autouse=True)
def use_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = library(request.param)
    monkeypatch.setattr(forward, "load_kernels", lambda: kernels)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_results_do_not_depend_on_batch_or_chunks(tmp_path: Path, quantization: str) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path, quantization=quantization)
    tokens = prompt_of(90)
    whole = engine.logits([slice_of(tokens, 0, 90)])
    for chunk in (1, 13, 64):
        for start in range(0, 90, chunk):
            others = [slice_of(prompt_of(60, number), 0, 60 - number, number=number) for number in range(1, 4)]
            logits = engine.logits([*others, slice_of(tokens, start, min(start + chunk, 90))])
        assert torch.equal(logits[-1], whole[0]), f"chunks of {chunk}"


def test_fewer_bits_cost_a_little_exactness(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **(SIZES | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}))
    slices = [slice_of(prompt_of(50, 1), 0, 50), slice_of(prompt_of(20, 2), 0, 20, number=1)]
    exact, int8, int4 = (load_tiny(tmp_path, quantization=name).logits(slices) for name in ("none", "int8", "int4"))
    spread = float(exact.std())
    # Random weights carry an error on undamped: bfloat16 alone moves these logits by 2 % of their spread, 8 bits by 5.
    assert 0 < error(int8, exact) < 0.07 * spread
    assert error(int8, exact) < error(int4, exact) < 0.6 * spread


def test_auto_leaves_weights_that_are_not_quantized(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    slices = [slice_of(prompt_of(50, 1), 0, 50)]
    assert torch.equal(load_tiny(tmp_path, quantization="auto").logits(slices), load_tiny(tmp_path).logits(slices))


def test_without_kernels_it_says_so(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    with pytest.raises(ConfigError, match="int4 needs compiled kernels") as raised:
        load_tiny(tmp_path, quantization="int4", native="off")
    assert raised.value.key == "quantization"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, quantization: str) -> None:
    save_checkpoint(tmp_path, **SIZES)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][5, 7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="not finite"):
        load_tiny(tmp_path, quantization=quantization)
