"""A real Gemma 3, 4-bit weights and all, against transformers with the same weights dequantized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from headrace_worker.torch_engine import TorchEngine
from tests.worker.checkpoints import load_tiny
from tests.worker.engine_driver import EngineDriver
from tests.worker.families.gemma import assemble, find_parts, write_without_vocabulary

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised while transformers is imported
    pytest.mark.model,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_parts(), reason="Gemma 3 270M is not installed (make test does it)"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    assemble(find_parts(), path)
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> TorchEngine:
    return load_tiny(path, num_blocks=128, block_size=16, tokens_per_iteration=256, num_threads=0)


@pytest.fixture(scope="module")
def tokenizer(engine: TorchEngine) -> Tokenizer:
    return Tokenizer.from_buffer(engine.facts.card.tokenizer)


def test_greedy_tokens_equal_those_of_transformers(engine: TorchEngine, tokenizer: Tokenizer, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    texts = ["The capital of France is", f"{long_text()}\n\nIn short:"]
    prompts = [tokenizer.encode(f"<bos>{text}").ids for text in texts]
    assert len(prompts[1]) > 550, "longer than the window of 512"
    driver = EngineDriver(engine)
    running = [driver.add(prompt) for prompt in prompts]
    driver.run_until(lambda one: len(one.output) >= 16)
    outputs = [one.output[:16] for one in running]
    assert "Paris" in tokenizer.decode(outputs[0]) or "France" in tokenizer.decode(outputs[0])

    bare = path.with_name("bare.gguf")
    write_without_vocabulary(path, bare)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(bare.parent), gguf_file=bare.name, dtype=torch.float32, local_files_only=True
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output)).logits[0]
        assert output == logits.argmax(dim=-1).tolist()


def long_text() -> str:
    """Some 600 tokens of plain English."""
    license_text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    return " ".join(license_text.split())[:3000]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  b", ["a", "▁▁", "b"]),
        ("\n\n\n", ["\n\n\n"]),
        ("<start_of_turn>user\nhi", ["<start_of_turn>", "user", "\n", "hi"]),
        ("\x07", ["<0x07>"]),
        ("The capital", ["The", "▁capital"]),
    ],
)
def test_text_becomes_the_pieces_that_the_model_was_trained_on(
    tokenizer: Tokenizer, text: str, pieces: list[str]
) -> None:
    encoded = tokenizer.encode(text)
    assert encoded.tokens == pieces
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_the_card_says_what_starts_and_ends_a_text(engine: TorchEngine) -> None:
    card = engine.facts.card
    assert (card.bos_token, card.adds_bos, card.eos_token_ids) == ("<bos>", True, (1,))
