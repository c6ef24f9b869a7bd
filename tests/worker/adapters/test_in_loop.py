"""Adapters as an engine of each kind runs them for its loop: the same tokens alone and together, on the CPU and on a
device."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from headrace_shared.messages import StopParams
from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.loop import IterationLoop
from headrace_worker.torch_engine import TorchEngine
from tests.worker.adapters.loop_runs import Wanted, run
from tests.worker.adapters.peft_files import merged, save_adapter
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.cuda.tiny_engine import build
from tests.worker.engine_driver import make_admission

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = ((1, ALL), (2, ("q_proj", "v_proj")))


def prompt_of(length: int) -> list[int]:
    return [(11 * place + 7 * length) % VOCAB_SIZE for place in range(length)]


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_sequences_of_several_adapters_and_none_decode_together(tmp_path: Path, kind: str) -> None:
    model = save_checkpoint(tmp_path / "m")
    folders = [save_adapter(tmp_path / str(seed), model, seed=seed, targets=targets) for seed, targets in TARGETS]
    engine: TorchEngine | CudaEngine
    if kind == "cpu":
        engine = load_tiny(tmp_path / "m", max_loras=2)
    else:
        engine = build(tmp_path / "m", max_loras=2, max_lora_rank=8)
    adapters = engine.adapters
    assert adapters is not None
    read = [adapters.read(str(folder)) for folder in folders]
    for adapter in read:
        adapters.add(adapter)
    models = {"": model} | {one.digest: merged(model, folder) for one, folder in zip(read, folders, strict=True)}
    first, second = read[0].digest, read[1].digest
    wanted = [
        Wanted(prompt_of(length), num_tokens, digest)
        for length, num_tokens, digest in ((40, 5, first), (3, 8, ""), (9, 6, second), (1, 7, first), (17, 4, ""))
    ]
    answers = run(engine, *wanted)
    for one, answer in zip(wanted, answers, strict=True):
        assert answer.error is None
        assert answer.tokens == greedy(models[one.digest], list(one.prompt), one.num_tokens)
    assert run(engine, wanted[0], first_id=20)[0].tokens == answers[0].tokens


def test_an_adapter_that_is_not_loaded_fails_its_own_sequence_only(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m")
    engine = load_tiny(tmp_path / "m", max_loras=1)
    missing, plain = run(engine, Wanted([5, 6], 3, digest="gone"), Wanted([5, 6], 3))
    assert missing.error is not None and "not loaded" in missing.error and missing.tokens == []
    assert plain.error is None and len(plain.tokens) == 3
    # An engine without any says the same.
    [missing] = run(load_tiny(tmp_path / "m"), Wanted([5, 6], 3, digest="gone"))
    assert missing.error is not None


def test_a_dropped_adapter_serves_those_who_have_it_until_they_end(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "m")
    engine = load_tiny(tmp_path / "m", max_loras=1)
    adapters = engine.adapters
    assert adapters is not None
    one = adapters.read(str(save_adapter(tmp_path / "1", model, seed=1)))
    other = adapters.read(str(save_adapter(tmp_path / "2", model, seed=2)))
    adapters.add(one)
    alone = run(engine, Wanted(prompt_of(5), 6, one.digest))[0].tokens

    loop = IterationLoop(engine)
    admission = make_admission(prompt_of(5), sequence_id=9, block_ids=range(2), stop=StopParams(max_tokens=6))
    loop.admit(replace(admission, request=replace(admission.request, adapter_digest=one.digest)))
    loop.step()
    adapters.drop(one.digest)
    assert one.digest not in adapters
    with pytest.raises(AdapterRefused):
        adapters.add(other)
    tokens = []
    while (result := loop.step()) is not None:
        tokens += [row.token for row in result.sequences if row.token is not None]
    assert tokens == alone[1:]
    adapters.add(other)
    assert other.digest in adapters
