"""The compiled forward pass against torch's, on tiny random checkpoints in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_worker import forward
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.team_size import OFTEN
from tests.worker.checkpoints import VOCAB_SIZE, prompt_of, save_checkpoint
from tests.worker.loop_builders import admission
from tests.worker.native_variants import VARIANTS, library
from tests.worker.tiny_native import SIZES, error, load_tiny, slice_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

MODELS: dict[str, dict[str, Any]] = {
    "tied head": {"tie_word_embeddings": True},
    "untied head, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "multi-query, wide heads": {"num_key_value_heads": 1, "head_dim": 64},
}


@pytest.fixture(params=list(VARIANTS))
def use_variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = library(request.param)
    monkeypatch.setattr(forward, "load_kernels", lambda: kernels)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits_are_as_exact_as_those_of_torch(use_variant: None, tmp_path: Path, changes: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **(SIZES | changes))
    compiled, plain = load_tiny(tmp_path), load_tiny(tmp_path, native="off")
    wide = load_tiny(tmp_path, native="off", dtype="float32")
    assert [type(engine._forward).__name__ for engine in (compiled, plain)] == ["NativeForward", "TorchForward"]
    first, second = prompt_of(50, 1), prompt_of(20, 2)
    batches = [
        [slice_of(first, 0, 40), slice_of(second, 0, 19, number=1)],
        [slice_of(first, 40, 41), slice_of(second, 19, 20, number=1)],
        [slice_of(first, 41, 50)],
    ]
    actual, rounded, exact = (
        torch.cat([engine.logits(slices).float() for slices in batches]) for engine in (compiled, plain, wide)
    )
    # Most of either error is the rounding of the weights, which they share.
    assert error(actual, exact) < 1.5 * error(rounded, exact)
    assert error(rounded, exact) < 0.1 * float(exact.std())


def test_results_do_not_depend_on_batch_or_chunks(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    tokens = prompt_of(90)
    whole = engine.logits([slice_of(tokens, 0, 90)])
    for chunk in (1, 13, 64):
        for start in range(0, 90, chunk):
            others = [slice_of(prompt_of(60, number), 0, 60 - number, number=number) for number in range(1, 4)]
            logits = engine.logits([*others, slice_of(tokens, start, min(start + chunk, 90))])
        assert torch.equal(logits[-1], whole[0]), f"chunks of {chunk}"


def test_results_do_not_depend_on_the_number_of_threads(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    few = [slice_of(prompt_of(60, number), 0, 60, number=number) for number in range(3)]
    engine.logits(few)
    one_more = [slice_of(prompt_of(61, number), 60, 61, number=number) for number in range(3)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            logits = [engine.logits(one_more) for _ in range(2 * OFTEN)]  # some of them with a thread fewer
            if count == 1:
                expected = logits[0]
            assert all(torch.equal(again, expected) for again in logits), count
    finally:
        torch.set_num_threads(threads)


def test_the_size_of_blocks_changes_next_to_nothing(use_variant: None, tmp_path: Path) -> None:
    """Blocks of 8 positions hold values in another order than blocks of 16."""
    save_checkpoint(tmp_path, **SIZES)
    tokens = prompt_of(50)
    small, large = (
        torch.cat(
            [
                engine.logits([slice_of(tokens, 0, 41, block_size=block_size)]),
                engine.logits([slice_of(tokens, 41, 42, block_size=block_size)]),
            ]
        )
        for block_size in (8, 16)
        for engine in [load_tiny(tmp_path, block_size=block_size)]
    )
    assert error(small, large) < 1e-2 * float(large.std())


@pytest.mark.parametrize("num_cached", [37, 38])
def test_a_copied_block_goes_on_with_other_tokens(use_variant: None, tmp_path: Path, num_cached: int) -> None:
    """Values lie in pairs of positions, one of which may be the source's and the other its own."""
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    source, own = prompt_of(45), [*prompt_of(45)[:num_cached], *prompt_of(8, 2)]
    alone = engine.logits([slice_of(own, 0, len(own), number=2)])
    shared = slice_of(source, 0, 45)
    engine.logits([shared])
    copy = slice_of(own, num_cached, len(own), number=1)
    copies = tuple(zip(shared.block_ids, copy.block_ids, strict=True))
    engine.add(admission(1, own, copy.block_ids, num_cached=num_cached, copies=copies))
    assert torch.equal(engine.logits([copy]), alone)


def test_unwritten_positions_do_not_matter(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    tokens = prompt_of(21)
    clean = engine.logits([slice_of(tokens, 0, 20)]), engine.logits([slice_of(tokens, 20, 21)])
    engine.cache.pages.fill_(torch.nan)
    dirty = engine.logits([slice_of(tokens, 0, 20)]), engine.logits([slice_of(tokens, 20, 21)])
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_greedy_tokens_are_the_likeliest_of_the_logits(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    slices = [slice_of(prompt_of(70 - number, number), 0, 70 - number, number=number) for number in range(4)]
    logits = engine.logits(slices)
    tokens = engine._forward.greedy(*engine._inputs(slices))
    assert tokens is not None
    assert tokens.tolist() == logits.argmax(-1).tolist()
    plain = load_tiny(tmp_path, native="off")
    assert plain._forward.greedy(*plain._inputs(slices)) is None


def test_a_sequence_whose_logits_are_not_finite_has_no_greedy_token(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    prompts = [prompt_of(20, number) for number in range(3)]
    engine.logits([slice_of(prompt, 0, 19, number=number) for number, prompt in enumerate(prompts)])
    last = [slice_of(prompt, 19, 20, number=number) for number, prompt in enumerate(prompts)]
    engine.cache.pages[:, last[1].block_ids[0]] = torch.nan
    tokens = engine._forward.greedy(*engine._inputs(last))
    assert tokens is not None
    assert [token < 0 for token in tokens.tolist()] == [False, True, False]


def test_equal_logits_give_the_first_token(use_variant: None, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **SIZES, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:1].repeat(VOCAB_SIZE, 1)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    engine = load_tiny(tmp_path)
    tokens = engine._forward.greedy(*engine._inputs([slice_of(prompt_of(9), 0, 9)]))
    assert tokens is not None
    assert tokens.tolist() == [0]


def test_models_that_do_not_fit_run_on_torch(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **(SIZES | {"head_dim": 16}))
    assert type(load_tiny(tmp_path)._forward).__name__ == "TorchForward"
    assert type(load_tiny(tmp_path, dtype="float32")._forward).__name__ == "TorchForward"


def test_without_a_compiler_it_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise NativeUnavailable("no C++ compiler")

    save_checkpoint(tmp_path, **SIZES)
    monkeypatch.setattr(forward, "load_kernels", fail)
    with caplog.at_level("WARNING"):
        engine = load_tiny(tmp_path)
    assert engine.logits([slice_of(prompt_of(5), 0, 5)]).isfinite().all()
    assert [record.message for record in caplog.records if record.name == "headrace_worker.forward"] == [
        "no compiled kernels, torch's own are slower: no C++ compiler"
    ]


def test_more_rows_than_there_are_cannot_be_sampled(use_variant: None, tmp_path: Path) -> None:
    """They would be normalized into memory that is as large as the batch."""
    save_checkpoint(tmp_path, **SIZES)
    engine = load_tiny(tmp_path)
    inputs, _ = engine._inputs([slice_of(prompt_of(3), 0, 3)])
    with pytest.raises(ValueError, match="4 rows are sampled of 3"):
        engine._forward(inputs._replace(sampled_rows=torch.zeros(4, dtype=torch.int64)))
