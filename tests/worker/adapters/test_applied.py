"""Adapters on the CPU paths, against models with the same adapters merged into their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker import forward
from headrace_worker.iteration import SequenceSlice
from headrace_worker.torch_engine import TorchEngine
from tests.worker.adapters.peft_files import merged, save_adapter
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.engine_driver import make_admission
from tests.worker.native_variants import VARIANTS, library

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
}
NATIVE_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BLOCKS_EACH = 8


def tokens_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def add_adapter(engine: TorchEngine, folder: Path) -> str:
    assert engine.adapters is not None
    read = engine.adapters.read(str(folder))
    engine.adapters.add(read)
    return read.digest


def admit(engine: TorchEngine, number: int, digest: str = "") -> None:
    admission = make_admission([1], sequence_id=number)
    request = replace(admission.request, adapter_digest=digest)
    engine.add(replace(admission, request=request))


def piece(tokens: list[int], number: int, start: int = 0, end: int | None = None) -> SequenceSlice:
    """Every sequence has blocks of its own."""
    end = len(tokens) if end is None else end
    blocks = [BlockId(number * BLOCKS_EACH + index * 3 % BLOCKS_EACH) for index in range(-(-end // 8))]
    return SequenceSlice(SequenceId(number), start, end - start, tokens[start:end], blocks, True)


def exact(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return logits


def deviation(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.float() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gives_what_merged_weights_give(tmp_path: Path, family: str) -> None:
    model = save_checkpoint(tmp_path / "m", family=family, **FAMILIES[family])
    folders = [
        save_adapter(tmp_path / "a", model, seed=1),
        save_adapter(tmp_path / "b", model, seed=2, rank=6, rslora=True, targets=("q_proj", "v_proj", "down_proj")),
    ]
    engine = load_tiny(tmp_path / "m", max_loras=2)
    digests = [add_adapter(engine, folder) for folder in folders]
    prompts = [tokens_of(length, length) for length in (13, 9, 20, 1, 11)]
    owners = ["", digests[0], digests[1], digests[1], digests[0]]
    models = {"": model, **{d: merged(model, f) for d, f in zip(digests, folders, strict=True)}}
    for number, digest in enumerate(owners):
        admit(engine, number, digest)
    rows = engine.logits([piece(prompt, number) for number, prompt in enumerate(prompts)])
    for row, prompt, digest in zip(rows, prompts, owners, strict=True):
        assert deviation(row, exact(models[digest], prompt)) < 1e-3
    assert deviation(rows[1], exact(model, prompts[1])) > 0.1  # the adapter makes a difference


def test_rows_without_an_adapter_are_the_same_bits_beside_some_that_have_one(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "m")
    engine = load_tiny(tmp_path / "m", max_loras=1, dtype="bfloat16", native="off")
    digest = add_adapter(engine, save_adapter(tmp_path / "a", model))
    prompts = [tokens_of(length, length) for length in (7, 12, 1)]
    slices = [piece(prompt, number) for number, prompt in enumerate(prompts)]
    plain = engine.logits(slices)
    for number, own in enumerate(("", digest, "")):
        admit(engine, number, own)
    mixed = engine.logits(slices)
    assert torch.equal(mixed[0], plain[0]) and torch.equal(mixed[2], plain[2])
    assert not torch.equal(mixed[1], plain[1])


@pytest.fixture(params=list(VARIANTS))
def use_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = library(request.param)
    monkeypatch.setattr(forward, "load_kernels", lambda: kernels)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_compiled_kernels_give_the_same_bits_in_every_batch(
    use_variant: None, tmp_path: Path, quantization: str
) -> None:
    model = save_checkpoint(tmp_path / "m", **NATIVE_SIZES)
    engine = load_tiny(
        tmp_path / "m", max_loras=2, dtype="bfloat16", num_blocks=100, num_threads=2, quantization=quantization
    )
    assert type(engine._forward).__name__ == "NativeForward"
    first = add_adapter(engine, save_adapter(tmp_path / "a", model, seed=1))
    second = add_adapter(engine, save_adapter(tmp_path / "b", model, seed=2, rank=5, targets=("k_proj", "up_proj")))
    prompts = [tokens_of(length, length) for length in (33, 9, 40, 1, 18)]
    owners = ["", first, second, first, ""]
    alone = []
    for number, prompt in enumerate(prompts):
        plain = piece(prompt, number)
        base = engine.logits([plain])[0]
        admit(engine, number, owners[number])
        alone.append(engine.logits([plain])[0])
        assert torch.equal(alone[-1], base) == (not owners[number])
    together = engine.logits([piece(prompt, number) for number, prompt in enumerate(prompts)])
    assert torch.equal(together, torch.stack(alone))
    # In chunks, with others at other places of the batch.
    engine.logits([piece(prompts[2], 2, 0, 25), piece(prompts[4], 4)])
    assert torch.equal(engine.logits([piece(prompts[0], 0), piece(prompts[2], 2, 25, 40)])[1], alone[2])


def test_compiled_kernels_are_as_exact_with_an_adapter_as_torch(use_variant: None, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "m", attention_bias=True, **NATIVE_SIZES)
    folder = save_adapter(tmp_path / "a", model, size=0.1)
    wanted = merged(model, folder)
    prompts = [tokens_of(length, length) for length in (40, 21)]
    goal = torch.stack([exact(wanted, prompt) for prompt in prompts])
    errors = []
    for native in ("auto", "off"):
        engine = load_tiny(tmp_path / "m", max_loras=1, dtype="bfloat16", native=native, num_threads=2)
        digest = add_adapter(engine, folder)
        for number in range(2):
            admit(engine, number, digest)
        rows = engine.logits([piece(prompt, number) for number, prompt in enumerate(prompts)])
        errors.append(float((rows.float() - goal).square().mean().sqrt()))
    assert errors[0] < 1.5 * errors[1]
    assert errors[1] < 0.2 * float((goal - torch.stack([exact(model, p) for p in prompts])).square().mean().sqrt())
