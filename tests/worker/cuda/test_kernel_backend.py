"""The engine on the kernels, interpreted: the same tokens as the synchronous engine, alone and together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_shared.messages import BlockId, SamplingParams, SequenceId, TokenLogprobs
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.device import HostDevice
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.cuda.triton_backend import triton_backend
from headrace_worker.iteration import SequenceSlice
from headrace_worker.models.checkpoint import open_checkpoint
from tests.worker.adapters.loop_runs import Wanted, run
from tests.worker.adapters.peft_files import save_adapter
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.engine_driver import EngineDriver, generate, make_admission, poison_free_blocks

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
NUM_NEW = 3
PROMPTS = ([(11 * place + 5) % VOCAB_SIZE for place in range(10)], [8])


def build(
    folder: Path, *, deterministic: bool = False, dtype: torch.dtype = torch.float32, **changes: Any
) -> CudaEngine:
    checkpoint = open_checkpoint(folder)
    return build_engine(
        checkpoint.config,
        checkpoint.source,
        triton_backend(HostDevice(), deterministic=deterministic),
        Sizes(
            context=64, block_size=16, num_blocks=24, max_sequences=4, tokens_per_iteration=24, memory_share=0.9
        )._replace(**changes),
        lambda context: checkpoint.make_card("tiny", context),
        dtype=dtype,
        report=lambda what, done, total: None,
    )


@pytest.mark.parametrize(("family", "changes"), [("Llama", {"attention_bias": True}), ("Qwen3", {"sliding_window": 6})])
def test_tokens_equal_those_of_the_synchronous_engine(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, family=family, **(SIZES | changes))
    reference = load_tiny(tmp_path)
    expected = [generate(reference, prompt, NUM_NEW) for prompt in PROMPTS]
    driver = EngineDriver(build(tmp_path), seed=4)
    poison_free_blocks(driver)
    running = [driver.add(prompt) for prompt in PROMPTS]
    driver.run_until(lambda one: len(one.output) >= NUM_NEW)
    assert [one.output[:NUM_NEW] for one in running] == expected


def test_blocks_are_copied_before_a_sequence_goes_on_behind_them(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = build(tmp_path)
    prompt = PROMPTS[0]
    [expected] = engine.logits([SequenceSlice(SequenceId(1), 0, 10, prompt, [BlockId(3)], True)])
    engine.add(make_admission(prompt, sequence_id=2, block_ids=[7], num_cached=9, copies=[(3, 7)]))
    engine.submit([SequenceSlice(SequenceId(2), 9, 1, prompt[9:], [BlockId(7)], True)])
    [sampled] = engine.collect()
    assert torch.equal(engine.cache.pages[:, 7, :, :, :9], engine.cache.pages[:, 3, :, :, :9])
    assert sampled.token == int(expected.argmax())


def test_deterministic_mode_gives_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = build(tmp_path, deterministic=True, dtype=torch.float16)
    sampling = SamplingParams(seed=3, temperature=1.0, num_logprobs=1)

    def run(others: list[list[int]]) -> tuple[list[int], list[TokenLogprobs | None]]:
        driver = EngineDriver(engine, seed=len(others))
        for prompt in others:
            driver.add(prompt)
        running = driver.add(PROMPTS[0], sampling)
        while len(running.output) < 2:
            driver.step()
        for one in list(driver.running):
            driver.finish(one)
        return running.output[:2], running.logprobs[:2]

    assert run([[5] * 3]) == run([])


def test_adapters_and_embeddings_on_the_kernels(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "m", **SIZES)
    folder = save_adapter(tmp_path / "a", model, rank=2)
    device, reference = build(tmp_path / "m", max_loras=1, max_lora_rank=2), load_tiny(tmp_path / "m", max_loras=1)
    answers = []
    for engine in (device, reference):
        assert engine.adapters is not None
        adapter = engine.adapters.read(str(folder))
        engine.adapters.add(adapter)
        wanted = [
            Wanted(PROMPTS[0], NUM_NEW, adapter.digest),
            Wanted(PROMPTS[0], NUM_NEW),
            Wanted([7, 8, 9], embeds=True),
        ]
        answers.append(run(engine, *wanted))
    assert [one.tokens for one in answers[0][:2]] == [one.tokens for one in answers[1][:2]]
    assert answers[0][0].tokens != answers[0][1].tokens
    assert answers[0][2].embedding == pytest.approx(answers[1][2].embedding, abs=1e-4)
