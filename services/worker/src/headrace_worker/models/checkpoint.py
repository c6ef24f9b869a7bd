"""A model's files, opened: architecture, weights and card, whatever the format."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace_shared.fleet_messages import ModelCard
from headrace_worker.models.card import SAMPLING_DEFAULTS, card_from_folder, card_from_gguf
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_config import gguf_config
from headrace_worker.models.gguf_tensors import GgufTensors
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.models.small_files import read_json
from headrace_worker.models.source import ModelFiles
from headrace_worker.models.weights import SafetensorsFolder, TensorSource


class Checkpoint(NamedTuple):
    config: ModelConfig
    source: TensorSource
    make_card: Callable[[str, int], ModelCard]
    """(name, context) -> card. Reads the tokenizer."""
    is_quantized: bool = False
    """Some tensors have fewer than 16 bits."""


def open_model(files: ModelFiles, generation_config: str) -> Checkpoint:
    """As `open_checkpoint`. `generation_config`: auto, or none: then the card has no defaults for sampling."""
    checkpoint = open_checkpoint(files.path)

    def make_card(name: str, context: int) -> ModelCard:
        card = checkpoint.make_card(name, context)
        if generation_config == "none":
            return replace(card, **dict.fromkeys(SAMPLING_DEFAULTS))
        return replace(card, **{key: value for key, value in files.sampling.items() if getattr(card, key) is None})

    return checkpoint._replace(make_card=make_card)


def open_checkpoint(path: Path) -> Checkpoint:
    """A folder or a .gguf file. Raises ConfigError for what cannot be run."""
    if path.is_dir():
        config = config_from_hf(read_json(path / "config.json"))

        def from_folder(name: str, context: int) -> ModelCard:
            card = card_from_folder(path, name=name, vocab_size=config.vocab_size, context=context)
            return replace(card, hidden_size=config.hidden_size)

        return Checkpoint(config, SafetensorsFolder(path), from_folder)
    file = GgufFile(path)
    gguf = gguf_config(file)

    def from_gguf(name: str, context: int) -> ModelCard:
        card = card_from_gguf(file, name=name, vocab_size=gguf.vocab_size, context=context)
        return replace(card, hidden_size=gguf.hidden_size)

    return Checkpoint(gguf, GgufTensors(file, gguf), from_gguf, file.is_quantized)
