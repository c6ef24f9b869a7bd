"""Families in bfloat16: as close to float32 as transformers is with the same rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.iteration import SequenceSlice
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.families.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "mistral, window"])
def test_rounding_is_no_worse_than_that_of_transformers(tmp_path: Path, name: str) -> None:
    changes: dict[str, Any] = VARIANTS[name]
    model = save_checkpoint(tmp_path, **changes)
    engine = load_tiny(tmp_path, dtype="bfloat16", native="off")
    tokens = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    ours = []
    for end in range(1, len(tokens) + 1):
        blocks = [BlockId(number) for number in range(-(-end // 8))]
        ours.append(engine.logits([SequenceSlice(SequenceId(0), 0, end, tokens[:end], blocks, True)])[0].float())
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0]
        theirs = model.to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
    assert rms(torch.stack(ours) - exact) < 1.3 * rms(theirs - exact)


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_experts_in_bfloat16_stay_close(tmp_path: Path, name: str) -> None:
    """At one token: rounding may choose another expert, and everything after it would differ."""
    model = save_checkpoint(tmp_path, seed=2, **VARIANTS[name])
    engine = load_tiny(tmp_path, dtype="bfloat16", native="off")
    errors = []
    for token in range(3, 43):
        piece = SequenceSlice(SequenceId(0), 0, 1, [token], [BlockId(0)], True)
        with torch.inference_mode():
            exact = model(torch.tensor([[token]])).logits[0, 0]
        errors.append(rms(engine.logits([piece])[0].float() - exact) / rms(exact))
    assert sorted(errors)[len(errors) // 2] < 0.03
