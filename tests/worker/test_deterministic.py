"""Deterministic mode on the CPU: what a request gets, to the last bit, whatever else is computed with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_shared.errors import ConfigError
from headrace_shared.messages import SamplingParams, TokenLogprobs
from headrace_worker.torch_engine import TorchEngine
from tests.worker.checkpoints import VOCAB_SIZE, load_tiny, save_checkpoint
from tests.worker.engine_driver import EngineDriver

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(45)]
SAMPLING = SamplingParams(seed=11, temperature=1.0, top_p=0.95, presence_penalty=0.5, num_logprobs=3)


def run(engine: TorchEngine, others: Sequence[int], budget: int = 32) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The request's tokens and log-probabilities, with as many others beside it, of these prompt lengths."""
    driver = EngineDriver(engine, budget=budget, seed=len(others))
    for length in others[::2]:
        driver.add([length] * length)
    running = driver.add(PROMPT, SAMPLING)
    for length in others[1::2]:
        driver.add([length] * length)
    while len(running.output) < 16:
        driver.step()
    for one in list(driver.running):
        driver.finish(one)
    return running.output[:16], running.logprobs[:16]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, **SIZES)
    return tmp_path


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_tokens_and_logprobs_are_the_same_bits_in_every_batch(checkpoint: Path, quantization: str) -> None:
    engine = load_tiny(checkpoint, deterministic=True, dtype="bfloat16", num_blocks=200, quantization=quantization)
    alone = run(engine, [])
    for others, budget in (([5], 32), ([1, 2, 3, 40, 9], 32), (list(range(1, 17)), 32), ([30], 7)):
        assert run(engine, others, budget) == alone, others


@pytest.mark.parametrize("changes", [{"native": "off", "dtype": "bfloat16"}, {"dtype": "float32"}])
def test_without_compiled_kernels_it_is_refused(checkpoint: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tiny(checkpoint, deterministic=True, **changes)
    assert caught.value.key == "deterministic"
