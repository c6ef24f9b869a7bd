"""A tiny random model of each family against transformers, in float32, over a paged cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.iteration import SequenceSlice
from headrace_worker.torch_engine import TorchEngine
from tests.worker.checkpoints import load_tiny, prompt_of, save_checkpoint
from tests.worker.engine_driver import EngineDriver, poison_free_blocks
from tests.worker.families.variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


@pytest.fixture(scope="module", params=list(VARIANTS.values()), ids=list(VARIANTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TorchEngine]:
    folder = tmp_path_factory.mktemp("family")
    model = save_checkpoint(folder, seed=3, **request.param)
    return model, load_tiny(folder)


def logits_at_every_position(engine: TorchEngine, tokens: list[int], chunk: int) -> Tensor:
    """[tokens, vocab_size], computed with chunks that grow by one position from their common start."""
    blocks = [
        BlockId(index * 7 % engine.facts.num_blocks) for index in range(-(-len(tokens) // engine.facts.block_size))
    ]
    rows = []
    for start in range(0, len(tokens), chunk):
        for end in range(start + 1, min(start + chunk, len(tokens)) + 1):
            piece = SequenceSlice(SequenceId(0), start, end - start, tokens[start:end], blocks, True)
            rows.append(engine.logits([piece])[0])
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [1, 11])
def test_logits_equal_those_of_transformers(pair: tuple[Any, TorchEngine], chunk: int) -> None:
    model, engine = pair
    tokens = prompt_of(50)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    difference = (logits_at_every_position(engine, tokens, chunk) - expected).abs().amax() / expected.abs().amax()
    assert difference < 1e-4


def test_greedy_tokens_equal_those_of_transformers(pair: tuple[Any, TorchEngine]) -> None:
    """Prompts longer than the windows, in chunks of other lengths, beside each other, one with a shared prefix."""
    model, engine = pair
    head = prompt_of(29, 1)
    prompts = [head, [*head, *prompt_of(8, 2)], prompt_of(3, 3), prompt_of(17, 4)]
    driver = EngineDriver(engine, budget=13)
    poison_free_blocks(driver)
    first = driver.add(prompts[0])
    while first.num_computed < len(head):
        driver.step()
    others = [driver.add(prompts[1], shares=first), *(driver.add(prompt) for prompt in prompts[2:])]
    assert others[0].num_computed >= 24, "the prefix is not computed again"
    driver.run_until(lambda one: len(one.output) >= 24)
    for running, prompt in zip([first, *others], prompts, strict=True):
        output = running.output[:24]
        assert output == greedy_continuation(model, prompt, output)


def greedy_continuation(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers would say next at each place of `output`. If it is the same, so are the greedy answers."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0]
    predicted: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return predicted


def test_the_number_of_parameters_follows_from_the_configuration(pair: tuple[Any, TorchEngine]) -> None:
    from headrace_worker.models.hf_config import config_from_hf

    model, _ = pair
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    assert config_from_hf(raw).num_parameters == sum(parameter.numel() for parameter in model.parameters())
