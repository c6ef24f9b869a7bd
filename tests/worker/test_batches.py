"""A batch is no more than its sequences: neighbours, chunks, shared blocks and moves change no token."""

from pathlib import Path

import pytest
import torch

from headrace_worker.torch_engine import TorchEngine
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.engine_driver import EngineDriver, generate, poison_free_blocks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(folder, seed=1)
    return load_tiny(folder)


def test_neighbours_chunks_and_dirty_blocks_change_no_token(tiny: TorchEngine) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 7, 8, 9, 40, 33, 16, 3))]
    alone = [generate(tiny, prompt, 12) for prompt in prompts]
    for budget in (9, 16, 32):
        driver = EngineDriver(tiny, budget=budget, seed=budget)
        poison_free_blocks(driver)
        running = [driver.add(prompt) for prompt in prompts]
        driver.run_until(lambda one: len(one.output) >= 12)
        assert [one.output[:12] for one in running] == alone


def test_shared_prefixes_and_copied_blocks_change_no_token(tiny: TorchEngine) -> None:
    head = prompt_of(37)
    prompts = [head + prompt_of(length, 50 + length) for length in (0, 1, 5, 12)]
    alone = [generate(tiny, prompt, 10) for prompt in prompts]
    driver = EngineDriver(tiny)
    poison_free_blocks(driver)
    first = driver.add(prompts[0])
    while first.num_computed < len(head):
        driver.step()
    others = [driver.add(prompt, shares=first) for prompt in prompts[1:]]
    assert all(one.num_computed >= 36 for one in others), "the prefix is not computed again"
    assert all(one.block_ids[:4] == first.block_ids[:4] for one in others)
    driver.run_until(lambda one: len(one.output) >= 10)
    assert [one.output[:10] for one in (first, *others)] == alone


def test_a_sequence_continues_on_another_engine(tiny: TorchEngine) -> None:
    prompt = prompt_of(20, 9)
    whole = generate(tiny, prompt, 14)
    driver = EngineDriver(tiny)
    running = driver.add(prompt, output=whole[:6])
    driver.run_until(lambda one: len(one.output) >= 8)
    assert running.output[:8] == whole[6:]


def test_removing_a_sequence_twice_or_unknown_is_no_error(tiny: TorchEngine) -> None:
    driver = EngineDriver(tiny)
    running = driver.add([5])
    driver.step()
    tiny.remove(running.sequence_id)
    tiny.remove(running.sequence_id)


def test_facts_say_what_was_configured(tiny: TorchEngine, tmp_path: Path) -> None:
    assert (tiny.facts.num_blocks, tiny.facts.block_size, tiny.facts.context) == (64, 8, 512)
    assert (tiny.facts.device, tiny.facts.dtype, tiny.looks_ahead) == ("cpu", "float32", False)
    assert tiny.facts.card.vocab_size == VOCAB_SIZE
    save_checkpoint(tmp_path)
    small = load_tiny(tmp_path, num_blocks=5, context=300, served_name="mine")
    assert small.facts.context == 40, "no more than the cache holds"
    assert small.facts.card.context == 40
    assert small.facts.card.model == "mine"
    assert load_tiny(tmp_path, context=100).facts.context == 100
    sized = load_tiny(tmp_path, num_blocks=0, kv_cache_bytes=1 << 20)
    assert sized.facts.num_blocks == (1 << 20) // (8 * 2 * 3 * 2 * 8 * 4)
