"""Loading a checkpoint for a device: the same tokens as the synchronous engine, and a cache that fits."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.sizing import DeviceMemory, Sizes, batch_sizes, blocks_that_fit
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.weight_bytes import WeightBits
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.cuda.tiny_engine import build
from tests.worker.cuda.torch_backend import torch_backend
from tests.worker.engine_driver import EngineDriver, generate, poison_free_blocks

MIB = 1 << 20


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": 20}),
    ],
)
def test_tokens_equal_those_of_the_synchronous_engine(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, family=family, **changes)
    reference, engine = load_tiny(tmp_path), build(tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 40, 9, 17, 3, 30)]
    expected = [generate(reference, prompt, 12) for prompt in prompts]
    driver = EngineDriver(engine, seed=3)
    poison_free_blocks(driver)
    running = [driver.add(prompt) for prompt in prompts]
    driver.run_until(lambda one: len(one.output) >= 12)
    assert [one.output[:12] for one in running] == expected


def test_the_cache_takes_what_iterations_leave(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    memory = DeviceMemory(total=2048 * MIB, free=1500 * MIB, own=100 * MIB)
    engine = build(tmp_path, memory, peak_bytes=50 * MIB, num_blocks=0, memory_share=0.5)
    block_bytes = engine.cache.pages[:, 0].nbytes
    # Half of all, less what is in use, two iterations' peaks and the records of sizes 1, 2, 4 and 6.
    left = 1024 * MIB - 100 * MIB - 2 * 50 * MIB - 4 * 32 * MIB
    assert left - 3 * block_bytes < (engine.facts.num_blocks + 1) * block_bytes <= left
    assert engine.facts.context == 128


def test_a_device_too_small_is_said_so_at_once(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="weights"):
        build(tmp_path, DeviceMemory(total=1 * MIB, free=0, own=0))
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, DeviceMemory(total=200 * MIB, free=200 * MIB, own=0), peak_bytes=90 * MIB, num_blocks=0)
    assert caught.value.key == "gpu_memory_share"


def test_quantized_weights_count_with_their_bits_and_the_others_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    whole = checkpoint.config.num_parameters * 4
    memory = DeviceMemory(total=whole, free=whole // 2, own=0)

    def load(bits: WeightBits) -> None:
        build_engine(
            checkpoint.config,
            checkpoint.source,
            torch_backend(memory)._replace(weight_bits=bits),
            Sizes(context=128, block_size=8, num_blocks=4, max_sequences=2, tokens_per_iteration=32, memory_share=0.9),
            lambda context: checkpoint.make_card("tiny", context),
            dtype=torch.float32,
            report=lambda what, done, total: None,
        )

    with pytest.raises(ConfigError, match="for its weights"):
        load(lambda num_outputs, num_inputs: 16)
    assert not caplog.records
    load(lambda num_outputs, num_inputs: 4 if num_inputs != 80 else None)
    assert "3 of 13 matrices are not quantized but stay in float32: no kernel for 80 inputs" in caplog.text


def test_few_blocks_bound_the_context(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    assert build(tmp_path, num_blocks=5).facts.context == 40


def test_batch_sizes_ascend_to_the_most_and_waste_few_rows() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    for most in range(1, 600, 7):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for count in range(1, most + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count <= max(7, count // 4) or size - count < 32 <= count


def test_blocks_never_exceed_what_is_free() -> None:
    shared = {"peak_bytes": 0, "num_records": 0, "block_bytes": MIB}
    others = DeviceMemory(total=100 * MIB, free=30 * MIB, own=10 * MIB)
    assert blocks_that_fit(others, share=1.0, **shared) == 29
    assert blocks_that_fit(others, share=0.2, **shared) == 9
