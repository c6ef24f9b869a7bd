"""Embeddings: the mean of transformers' last hidden states, on every path, however the prompt is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from headrace_shared.messages import SequenceId, StopParams
from headrace_worker.iteration import Engine
from headrace_worker.loop import IterationLoop
from headrace_worker.parallel.loading import load_rank
from tests.worker.adapters.loop_runs import Wanted, run
from tests.worker.adapters.peft_files import merged, save_adapter
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.cuda.tiny_engine import build
from tests.worker.engine_driver import make_admission
from tests.worker.parallel.thread_ranks import LoadRank, load_on_host_device, rank_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

LENGTHS = (50, 1, 7, 33)
NATIVE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def prompt_of(length: int) -> list[int]:
    return [(13 * place + 5 * length) % VOCAB_SIZE for place in range(length)]


def expected(model: Any, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return F.normalize(hidden.mean(dim=0), dim=0)


def check(engine: Engine, model: Any, tolerance: float, digest: str = "") -> None:
    """Beside sequences that decode."""
    wanted = [Wanted(prompt_of(length), embeds=True, digest=digest) for length in LENGTHS]
    answers = run(engine, Wanted(prompt_of(4), 6), *wanted, Wanted(prompt_of(30), 3))
    assert [len(answer.tokens) for answer in answers] == [6, 1, 1, 1, 1, 3]
    assert not answers[0].embedding and not answers[-1].embedding
    for length, answer in zip(LENGTHS, answers[1:-1], strict=True):
        actual = torch.tensor(answer.embedding)
        assert abs(float(actual.norm()) - 1.0) < 1e-5
        assert float((actual - expected(model, prompt_of(length))).abs().max()) < tolerance, length


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_it_is_the_mean_of_the_last_hidden_states(tmp_path: Path, family: str) -> None:
    changes: dict[str, Any] = {"Gemma3": {"head_dim": 16, "query_pre_attn_scalar": 16}, "Qwen3": {"head_dim": 16}}
    model = save_checkpoint(tmp_path, family=family, **changes.get(family, {}))
    check(load_tiny(tmp_path, tokens_per_iteration=20), model, 1e-4)


def test_drafts_for_others_change_nothing(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path)
    check(load_tiny(tmp_path, tokens_per_iteration=20, speculative_tokens=3), model, 1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_compiled_kernels_give_it_too(tmp_path: Path, quantization: str) -> None:
    model = save_checkpoint(tmp_path, **NATIVE)
    engine = load_tiny(
        tmp_path, dtype="bfloat16", tokens_per_iteration=20, num_threads=2, num_blocks=100, quantization=quantization
    )
    assert type(engine._forward).__name__ == "NativeForward"
    check(engine, model, 0.02)


def test_it_is_the_same_bits_whatever_the_chunks_and_the_batch(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **NATIVE)
    engine = load_tiny(tmp_path, dtype="bfloat16", tokens_per_iteration=64, num_threads=2, num_blocks=100)
    wanted = Wanted(prompt_of(50), embeds=True)
    [alone] = run(engine, wanted)
    beside = run(engine, wanted, Wanted(prompt_of(9), 4), Wanted(prompt_of(3), embeds=True), first_id=10)[0]
    assert beside.embedding == alone.embedding


def test_one_that_begins_again_begins_from_nothing(tmp_path: Path) -> None:
    """After a preemption, or on another worker."""
    model = save_checkpoint(tmp_path)
    engine = load_tiny(tmp_path, tokens_per_iteration=20)
    loop = IterationLoop(engine)
    prompt = prompt_of(50)
    admission = make_admission(prompt, sequence_id=1, block_ids=range(7), stop=StopParams(max_tokens=1))
    admission = replace(admission, request=replace(admission.request, embeds=True))
    loop.admit(admission)
    loop.step()
    loop.release(admission.sequence_id)
    assert loop.step() is not None
    [answer] = run(engine, Wanted(prompt, embeds=True), first_id=2)
    assert float((torch.tensor(answer.embedding) - expected(model, prompt)).abs().max()) < 1e-4
    # Nobody may skip a part of the prompt.
    loop.admit(replace(admission, sequence_id=SequenceId(9), num_cached=8))
    result = loop.step()
    assert result is not None and result.sequences[0].error is not None


def test_a_device_gives_it_too(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path)
    check(build(tmp_path, tokens_per_iteration=20, num_blocks=100), model, 1e-4)


@pytest.mark.parametrize(
    ("divisions", "load"), [((2, 1), load_rank), ((2, 2), load_rank), ((2, 2), load_on_host_device)]
)
def test_several_ranks_give_it_too(tmp_path: Path, divisions: tuple[int, int], load: LoadRank) -> None:
    model = save_checkpoint(tmp_path)
    with rank_threads(tmp_path, *divisions, load, max_sequences=8, tokens_per_iteration=20, num_blocks=100) as engine:
        check(engine, model, 1e-4)
        [refused] = run(engine, Wanted([5, 6], 3, digest="any"))
        assert refused.error is not None and "not loaded" in refused.error


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_it_may_come_from_an_adapter(tmp_path: Path, kind: str) -> None:
    model = save_checkpoint(tmp_path / "m")
    folder = save_adapter(tmp_path / "a", model)
    make: dict[str, Callable[[], Any]] = {
        "cpu": lambda: load_tiny(tmp_path / "m", max_loras=1, tokens_per_iteration=20),
        "device": lambda: build(
            tmp_path / "m", max_loras=1, max_lora_rank=8, tokens_per_iteration=20, num_blocks=100, max_sequences=8
        ),
    }
    engine = make[kind]()
    adapter = engine.adapters.read(str(folder))
    engine.adapters.add(adapter)
    check(engine, merged(model, folder), 1e-4, adapter.digest)
