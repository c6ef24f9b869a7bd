"""Greedy tokens of every family are the same however the model is divided."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.config import EngineConfig
from headrace_worker.iteration import Engine
from headrace_worker.loop import IterationLoop
from headrace_worker.parallel.loading import check_settings
from headrace_worker.parallel.place import RankPlace
from tests.worker.checkpoints import load_tiny, prompt_of, save_checkpoint
from tests.worker.families.variants import VARIANTS
from tests.worker.loop_builders import Collected, admission, run_until_idle
from tests.worker.parallel.thread_ranks import load_on_host_device, rank_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

MODELS = {
    "llama, three key-value heads": {"num_key_value_heads": 3},
    **{
        name: VARIANTS[name]
        for name in (
            "llama, untied, biases",
            "llama, multi-query",
            "mistral, window",
            "qwen2",
            "qwen3, biases, yarn",
            "gemma3",
            "mixtral",
            "qwen3 moe",
        )
    },
}
DIVISIONS = [(2, 1), (1, 2), (2, 2)]
PROMPTS = [prompt_of(29, 1), prompt_of(3, 3), prompt_of(17, 4), prompt_of(40, 5)]
NUM_TOKENS = 12


def greedy(engine: Engine) -> dict[int, list[int]]:
    """All prompts together, in chunks, through the loop that serves."""
    return generated(engine).tokens


def generated(engine: Engine, num_tokens: int = NUM_TOKENS) -> Collected:
    loop = IterationLoop(engine)
    for number, prompt in enumerate(PROMPTS):
        blocks = range(number * 16, number * 16 + 16)
        loop.admit(admission(number, prompt, blocks, max_tokens=num_tokens, temperature=0.0))
    collected = run_until_idle(loop)
    assert not collected.errors
    return collected


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_greedy_tokens_are_the_same_however_the_model_is_divided(model: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, seed=3, **model)
    expected = greedy(load_tiny(tmp_path))
    assert all(len(tokens) == NUM_TOKENS for tokens in expected.values())
    for tensor_parallel, pipeline_parallel in DIVISIONS:
        with rank_threads(tmp_path, tensor_parallel, pipeline_parallel) as engine:
            assert greedy(engine) == expected, f"TP {tensor_parallel}, PP {pipeline_parallel}"


def test_all_ranks_rest_and_go_on_as_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, seed=3)
    expected = greedy(load_tiny(tmp_path))
    with rank_threads(tmp_path, 2, 2) as engine:
        assert greedy(engine) == expected
        engine.rest()
        assert greedy(engine) == expected


def test_drafts_are_verified_by_all_ranks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, seed=3)
    expected = generated(load_tiny(tmp_path), num_tokens=60)
    with rank_threads(tmp_path, 2, 1, speculative_tokens=3) as engine:
        drafted = generated(engine, num_tokens=60)
    assert drafted.tokens == expected.tokens
    assert drafted.num_iterations < expected.num_iterations


@pytest.mark.parametrize(
    ("changes", "pipeline_parallel", "key"),
    [
        ({"speculative_tokens": 3}, 2, "speculative_tokens"),
        ({"deterministic": True}, 1, "deterministic"),
        ({"quantization": "int8"}, 1, "quantization"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_only_one_rank_can_do_is_refused(
    changes: dict[str, Any], pipeline_parallel: int, key: str, device: str
) -> None:
    place = RankPlace(tensor_parallel=2, pipeline_parallel=pipeline_parallel)
    with pytest.raises(ConfigError) as caught:
        check_settings(EngineConfig(place=place, **changes), torch.device(device))
    assert caught.value.key == key


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), DIVISIONS)
def test_the_engine_of_a_device_gives_the_same_tokens_on_several_ranks(
    tmp_path: Path, tensor_parallel: int, pipeline_parallel: int
) -> None:
    """With look-ahead, recorded batch sizes and padding."""
    save_checkpoint(tmp_path, seed=3)
    expected = greedy(load_tiny(tmp_path))
    with rank_threads(tmp_path, tensor_parallel, pipeline_parallel, load_on_host_device, max_sequences=6) as engine:
        assert greedy(engine) == expected
