"""Model cards."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_worker.models.card import card_from_folder, card_from_gguf
from headrace_worker.models.checkpoint import open_checkpoint, open_model
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.source import ModelFiles, find_model
from tests.prompts import ALL
from tests.worker.checkpoints import VOCAB_SIZE, save_checkpoint
from tests.worker.tiny_gguf import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

TEXTS = (
    *ALL,
    "",
    " ",
    "\n\n1. One\n\n2. Two",
    "  12 345  6,7",
    "tabs\t\tand\r\nlines\u2028",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>",
    "don't I'll we've they're",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200d zero \x00 width ﬁ",
)


def _write(folder: Path, **files: Any) -> None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def _save_tokenizer(folder: Path, *, bos: bool = False) -> None:
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|eot_id|>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))


def _card(folder: Path) -> ModelCard:
    return card_from_folder(folder, name="m", vocab_size=5, context=100)


def test_a_folder_gives_tokens_template_and_defaults(tmp_path: Path) -> None:
    _save_tokenizer(tmp_path, bos=True)
    _write(
        tmp_path,
        config={"eos_token_id": 3},
        generation_config={"eos_token_id": [3, 1], "temperature": 0.6, "top_p": 0.9, "top_k": 40},
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": "{{ messages }}<|eot_id|>",
        },
    )
    card = _card(tmp_path)
    assert card.eos_token_ids == (3, 1, 4), "generation config, then config, then the end of a turn"
    assert (card.bos_token, card.eos_token, card.adds_bos) == ("<s>", "</s>", True)
    assert card.chat_template == "{{ messages }}<|eot_id|>"
    assert (card.temperature, card.top_p, card.top_k, card.repetition_penalty) == (0.6, 0.9, 40, None)
    assert card.tokenizer == (tmp_path / "tokenizer.json").read_bytes()
    assert card.created > 1_700_000_000


def test_a_folder_that_says_little(tmp_path: Path) -> None:
    _save_tokenizer(tmp_path)
    _write(tmp_path, config={})
    card = _card(tmp_path)
    assert (card.eos_token_ids, card.bos_token, card.adds_bos, card.chat_template) == ((), "", False, None)
    assert card.temperature is None


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    _save_tokenizer(tmp_path)
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    _write(tmp_path, tokenizer_config={"chat_template": several})
    assert _card(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("separate")
    assert _card(tmp_path).chat_template == "separate"


@pytest.mark.parametrize("name", ["tokenizer", "config", "generation_config", "tokenizer_config"])
@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_broken_files_are_config_errors(tmp_path: Path, name: str, text: str) -> None:
    _save_tokenizer(tmp_path)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model: "):
        _card(tmp_path)


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    _write(tmp_path, config={"model_type": "llama", "vocab_size": VOCAB_SIZE})
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        _card(tmp_path)


@pytest.mark.model
def test_the_built_in_models_card() -> None:
    path = find_model("smollm2-135m").path
    card = open_checkpoint(path).make_card("smollm2-135m", 8192)
    tokenizer = Tokenizer.from_buffer(card.tokenizer)
    assert tokenizer.get_vocab_size() == 49152
    assert card.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert (card.bos_token, card.eos_token, card.adds_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert (card.vocab_size, card.context, card.hidden_size) == (49152, 8192, 576)
    assert card.chat_template is not None
    assert "<|im_start|>" in card.chat_template


@pytest.mark.model
def test_the_built_in_models_tokenizer_equals_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    path = find_model("smollm2-135m").path
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    card = card_from_gguf(GgufFile(path), name="m", vocab_size=49152, context=8192)
    ours = Tokenizer.from_buffer(card.tokenizer)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("kind", "pre"), [("gpt2", "default"), ("gpt2", "llama-bpe")])
def test_a_gguf_vocabulary_becomes_a_tokenizer(tmp_path: Path, kind: str, pre: str) -> None:
    import numpy as np

    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"output_norm.weight": np.ones(48, dtype=np.float32)}, tokenizer_ggml_pre=pre)
    card = card_from_gguf(GgufFile(path), name="tiny", vocab_size=160, context=512)
    tokenizer = Tokenizer.from_buffer(card.tokenizer)
    assert tokenizer.encode("abc<3>").tokens == ["ab", "c", "<3>"]
    assert card.chat_template is None


def _sampling(card: ModelCard) -> tuple[float | None, ...]:
    return card.temperature, card.top_p, card.top_k, card.repetition_penalty


@pytest.mark.model
def test_the_built_in_model_has_the_defaults_that_its_authors_recommend() -> None:
    files = find_model("smollm2-135m")
    assert _sampling(open_model(files, "auto").make_card("m", 64)) == (0.2, 0.9, None, None)
    assert _sampling(open_model(files, "none").make_card("m", 64)) == (None, None, None, None)


def test_defaults_for_sampling_come_from_the_file_then_from_the_package_or_from_nowhere(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "tiny.gguf"
    write_gguf(path, {"output_norm.weight": np.ones(48, dtype=np.float32)})
    file = GgufFile(path)
    file.metadata |= {"general.sampling.temp": float(np.float32(0.7)), "general.sampling.top_k": 40}
    card = card_from_gguf(file, name="tiny", vocab_size=160, context=512)
    assert _sampling(card) == (0.7, None, 40, None)
    file.metadata["general.sampling.temp"] = "hot"
    with pytest.raises(ConfigError, match=r"general.sampling.temp in tiny.gguf is no number from 0.0 to 2.0"):
        card_from_gguf(file, name="tiny", vocab_size=160, context=512)

    folder = tmp_path / "folder"
    save_checkpoint(folder)
    _write(folder, generation_config={"temperature": 0.6})
    files = ModelFiles("m", folder, {"temperature": 0.2, "top_p": 0.9})
    assert _sampling(open_model(files, "auto").make_card("m", 64)) == (0.6, 0.9, None, None)
    assert _sampling(open_model(files, "none").make_card("m", 64)) == (None, None, None, None)


def test_a_gguf_file_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        card_from_gguf(GgufFile(path), name="m", vocab_size=1, context=1)
