"""The compiled forward pass against torch's, on tiny random checkpoints in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker import forward
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.iteration import SequenceSlice
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.torch_engine import TorchEngine
from tests.worker.checkpoints import VOCAB_SIZE, save_checkpoint
from tests.worker.native_variants import VARIANTS, library

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied head": {"tie_word_embeddings": True},
    "untied head, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "multi-query, wide heads": {"num_key_value_heads": 1, "head_dim": 64},
}


def load_tiny(folder: Path, native: str = "auto", dtype: str = "bfloat16") -> TorchEngine:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype=dtype, block_size=8, num_blocks=100, num_threads=2, native=native
    )
    engine = load(config, lambda what, done, total: None)
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.fixture(params=list(VARIANTS))
def use_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = library(request.param)
    monkeypatch.setattr(forward, "load_kernels", lambda: kernels)


def slice_of(tokens: list[int], start: int, end: int, *, number: int = 0) -> SequenceSlice:
    """Every sequence has 20 blocks of its own, in an order of its own."""
    blocks = [BlockId(number * 20 + index * 7 % 20) for index in range(-(-end // 8))]
    return SequenceSlice(SequenceId(number), start, end - start, tokens[start:end], blocks, True)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).square().mean().sqrt())


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_are_as_exact_as_those_of_torch(use_variant: None, tmp_path: Path, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **(SIZES | changes))
    compiled, plain = load_tiny(tmp_path), load_tiny(tmp_path, native="off")
    wide = load_tiny(tmp_path, native="off", dtype="float32")
    assert [type(engine._forward).__name__ for engine in (compiled, plain)] == ["NativeForward", "TorchForward"]
    first, second = tokens_of(50, 1), tokens_of(20, 2)
    batches = [
        [slice_of(first, 0, 40), slice_of(second, 0, 19, number=1)],
        [slice_of(first, 40, 41), slice_of(second, 19, 20, number=1)],
        [slice_of(first, 41, 50)],
    ]
    actual, rounded, exact = (
        torch.cat([engine.logits(slices).float() for slices in batches]) for engine in (compiled, plain, wide)
    )
    # Most of either error is the rounding of the weights, which they share.
    assert error(actual, exact) < 1.5 * error(rounded, exact)
    assert error(rounded, exact) < 0.1 * float(exact.std())


def test_results_do_not_depend_on_batch_or_chunks(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    tokens = tokens_of(90)
    whole = engine.logits([slice_of(tokens, 0, 90)])
    for chunk in (1, 13, 64):
        for start in range(0, 90, chunk):
            others = [slice_of(tokens_of(60, number), 0, 60 - number, number=number) for number in range(1, 4)]
            logits = engine.logits([*others, slice_of(tokens, start, min(start + chunk, 90))])
        assert torch.equal(logits[-1], whole[0]), f"chunks of {chunk}"


def test_unwritten_positions_do_not_matter(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    tokens = tokens_of(21)
    clean = engine.logits([slice_of(tokens, 0, 20)]), engine.logits([slice_of(tokens, 20, 21)])
    engine.cache.pages.fill_(torch.nan)
    dirty = engine.logits([slice_of(tokens, 0, 20)]), engine.logits([slice_of(tokens, 20, 21)])
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_models_that_do_not_fit_run_on_torch(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **(SIZES | {"head_dim": 16}))
    assert type(load_tiny(tmp_path)._forward).__name__ == "TorchForward"
    assert type(load_tiny(tmp_path, dtype="float32")._forward).__name__ == "TorchForward"


def test_without_a_compiler_it_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise NativeUnavailable("no C++ compiler")

    save_checkpoint(tmp_path, **SIZES)
    monkeypatch.setattr(forward, "load_kernels", fail)
    with caplog.at_level("WARNING"):
        engine = load_tiny(tmp_path)
    assert engine.logits([slice_of(tokens_of(5), 0, 5)]).isfinite().all()
    assert [record.message for record in caplog.records if record.name == "headrace_worker.forward"] == [
        "no compiled kernels, torch's own are slower: no C++ compiler"
    ]
