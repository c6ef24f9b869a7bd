"""Tokenizers in formats that only transformers can convert, without running anything that came with the checkpoint.

transformers looks for code of the checkpoint's own where a configuration names it (`auto_map`), and has had faults in
how it was told not to. So it never sees the checkpoint: it gets a folder with links to the files of known formats and
with configurations from which everything that could name code is taken out. What is not there cannot be run.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from headrace_worker.models.small_files import MAX_TOKENIZER_BYTES, read_bytes, read_json

_DATA = ("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
_CONFIGURATIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_NAMES_CODE = ("auto_map", "custom_pipelines", "trust_remote_code", "_name_or_path", "name_or_path")


def tokenizer_from_folder(folder: Path) -> bytes:
    """tokenizer.json. Raises ConfigError, and whatever a foreign file provokes in transformers."""
    with tempfile.TemporaryDirectory(prefix="headrace-tokenizer-") as name:
        safe = Path(name)
        for file in (folder / name for name in _DATA):
            if file.exists():
                (safe / file.name).write_bytes(read_bytes(file, MAX_TOKENIZER_BYTES))
        for file in (folder / name for name in _CONFIGURATIONS):
            if file.exists():
                (safe / file.name).write_text(json.dumps(without_code(read_json(file))), encoding="utf-8")
        return _convert(safe)


def tokenizer_from_gguf(path: Path) -> bytes:
    """tokenizer.json. Raises whatever a foreign file provokes in transformers."""
    with tempfile.TemporaryDirectory(prefix="headrace-tokenizer-") as name:
        (Path(name) / "model.gguf").symlink_to(path.resolve())
        return _convert(Path(name), gguf_file="model.gguf")


def without_code(value: Any) -> Any:
    """A configuration, at any depth without the keys that could name code."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key not in _NAMES_CODE}
    if isinstance(value, list):
        return [without_code(item) for item in value]
    return value


def first_line(error: Exception) -> str:
    """What the user is told of an error of transformers."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]


def _convert(folder: Path, **more: str) -> bytes:
    from transformers import AutoTokenizer  # Takes a second, and most models do not need it.

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **more)
    return str(tokenizer.backend_tokenizer.to_str()).encode()
