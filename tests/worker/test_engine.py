"""The real model against transformers: greedy tokens, alone and together."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from headrace_shared.messages import SamplingParams
from headrace_worker.config import EngineConfig
from headrace_worker.engine import load
from headrace_worker.torch_engine import TorchEngine
from tests import prompts
from tests.reference import Reference
from tests.worker.engine_driver import EngineDriver, Running, generate, poison_free_blocks

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while transformers is imported
    pytest.mark.timeout(300),
]

PROMPTS = prompts.SHORT + prompts.UNICODE + prompts.LONG[:3]
NUM_NEW = 6
TIE = 1e-3
"""Float32 logits of different summation orders differ by about 1e-5 here; what is closer than this is a tie."""


class Loaded(NamedTuple):
    engine: TorchEngine
    reference: Reference
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    # One thread: on a busy machine threads that wait for each other take many times as long.
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=1 << 30, num_threads=1)
    engine = load(config, lambda what, done, total: None)
    assert isinstance(engine, TorchEngine)
    reference = Reference()
    return Loaded(engine, reference, [reference.ids(prompt)[:500] for prompt in PROMPTS])


def assert_greedy(reference: Reference, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the reference's arg-max after what came before it, or as good as that: a tie."""
    misses = reference.misses(prompt, output)
    assert all(miss.gap < TIE for miss in misses), f"output of {list(prompt[:8])}…: {misses}"


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[list[int]]:
    return [generate(loaded.engine, prompt, NUM_NEW) for prompt in loaded.prompts]


def is_done(running: Running) -> bool:
    return len(running.output) >= NUM_NEW


def test_the_capital_of_france(loaded: Loaded) -> None:
    prompt = loaded.reference.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    output = generate(loaded.engine, list(prompt), 8)
    assert loaded.reference.tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert output[-1] in loaded.engine.facts.card.eos_token_ids


def test_prompts_are_short_long_and_not_english(loaded: Loaded) -> None:
    lengths = [len(prompt) for prompt in loaded.prompts]
    assert len(lengths) == 27
    assert sum(length >= 400 for length in lengths) >= 3
    assert min(lengths) < 4


def test_tokens_equal_generate(loaded: Loaded, alone: list[list[int]]) -> None:
    for index in (0, 17, 24):
        expected = loaded.reference.generate(loaded.prompts[index], NUM_NEW)
        ties = loaded.reference.misses(loaded.prompts[index], alone[index])
        num_comparable = ties[0].position if ties else NUM_NEW  # the next test bounds the gaps of ties
        assert alone[index][:num_comparable] == expected[:num_comparable], PROMPTS[index]


def test_every_prompt_alone_is_greedy(loaded: Loaded, alone: list[list[int]]) -> None:
    for prompt, output in zip(loaded.prompts, alone, strict=True):
        assert_greedy(loaded.reference, prompt, output)


def assert_equal_or_tied(loaded: Loaded, outputs: list[list[int]], alone: list[list[int]]) -> None:
    for prompt, output, expected in zip(loaded.prompts, outputs, alone, strict=True):
        if output != expected:
            assert_greedy(loaded.reference, prompt, output)


def test_all_prompts_at_once_equal_their_solo_runs(loaded: Loaded, alone: list[list[int]]) -> None:
    """Chunked prompts, fragmented blocks whose memory is NaN at first, sequences that come and go."""
    driver = EngineDriver(loaded.engine, budget=200, seed=1)
    poison_free_blocks(driver)
    running = [driver.add(prompt) for prompt in loaded.prompts]
    driver.run_until(is_done)
    assert_equal_or_tied(loaded, [one.output[:NUM_NEW] for one in running], alone)
    assert len(driver.free) == loaded.engine.facts.num_blocks


def test_sixteen_with_one_prefix_equal_their_solo_runs(loaded: Loaded) -> None:
    head = loaded.prompts[24][:203]
    tails = [loaded.prompts[index][:6] for index in range(16)]
    driver = EngineDriver(loaded.engine, seed=2)
    poison_free_blocks(driver)
    first = driver.add(head + tails[0])
    while first.num_computed < len(head):
        driver.step()
    running = [first, *(driver.add(head + tail, shares=first) for tail in tails[1:])]
    assert sum(one.num_computed for one in running[1:]) >= 15 * 203
    driver.run_until(lambda one: len(one.output) >= 6)
    for one, tail in zip(running, tails, strict=True):
        assert_greedy(loaded.reference, head + tail, one.output[:6])


def test_a_preempted_sequence_samples_what_it_would_have_sampled(loaded: Loaded) -> None:
    sampling = SamplingParams(seed=7, temperature=1.0, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3)
    prompt = loaded.prompts[1]
    whole = generate(loaded.engine, prompt, 20, sampling)
    driver = EngineDriver(loaded.engine)
    running = driver.add(prompt, sampling, output=whole[:9])
    driver.run_until(lambda one: len(one.output) >= 11)
    assert running.output[:11] == whole[9:]


def test_choices_share_their_prompt_and_differ(loaded: Loaded) -> None:
    """A prompt of 37 tokens: the last, partly filled block is copied for each choice."""
    prompt = loaded.prompts[24][:37]
    sampling = SamplingParams(seed=7, temperature=1.0)
    outputs = []
    for _ in range(2):
        driver = EngineDriver(loaded.engine)
        first = driver.add(prompt, sampling)
        driver.step()
        running = [first, *(driver.add(prompt, sampling, choice=choice, shares=first) for choice in (1, 2, 3))]
        driver.finish(running[2], free=False)
        driver.run_until(lambda one: len(one.output) >= 12)
        outputs.append([one.output[:12] for one in running if one is not running[2]])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 3
    solo = EngineDriver(loaded.engine)
    third = solo.add(prompt, sampling, choice=3)
    solo.run_until(lambda one: len(one.output) >= 12)
    assert third.output[:12] == outputs[0][2]


def test_bfloat16_gives_the_same_answer(loaded: Loaded) -> None:
    engine = load(
        EngineConfig(dtype="bfloat16", device="cpu", num_blocks=64, num_threads=1), lambda what, done, total: None
    )
    tokenizer = loaded.reference.tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(generate(engine, list(prompt), 8)) == "The capital of France is Paris.<|im_end|>"
