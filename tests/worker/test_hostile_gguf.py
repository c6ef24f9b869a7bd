"""GGUF files that lie about themselves end in one clear line."""

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace_shared.errors import ConfigError
from headrace_worker.models.card import card_from_gguf
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_config import gguf_config
from tests.worker.tiny_gguf import write_gguf


def gguf_bytes(entries: Sequence[bytes], tensors: Sequence[bytes] = (), data: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join([*entries, *tensors]) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    "data",
    [
        gguf_bytes([], [tensor("a", [4], 0, 0), tensor("b", [4], 0, 0)], bytes(200)),
        gguf_bytes([], [tensor("a", [16], 0, 0), tensor("b", [16], 0, 32)], bytes(200)),
        gguf_bytes([], [tensor("a", [4], 0, 0), tensor("a", [4], 0, 32)], bytes(200)),
        gguf_bytes([], [tensor("a", [4], 0, 7)], bytes(200)),
        gguf_bytes([], [tensor("a", [4], 0, 2**63)], bytes(200)),
        gguf_bytes([], [tensor("a", [2**63, 2**63], 0, 0)], bytes(200)),
        gguf_bytes([], [tensor("a", [0], 0, 0)], bytes(200)),
        gguf_bytes([], [tensor("a", [4] * 5, 0, 0)], bytes(200)),
        gguf_bytes([], [tensor("a", [4], 999, 0)], bytes(200)),
        gguf_bytes([], [tensor("a", [4], 2, 0)], bytes(200)),
        gguf_bytes([text("a") + struct.pack("<II", 4, 1)] * 2),
        gguf_bytes([text("general.alignment") + struct.pack("<II", 4, 0)]),
        gguf_bytes([text("general.alignment") + struct.pack("<II", 4, 2**31)]),
        gguf_bytes([text("general.alignment") + struct.pack("<IIQ", 9, 4, 0)]),
        gguf_bytes([text("general.alignment") + struct.pack("<If", 6, float("inf"))]),
        gguf_bytes([text("a") + struct.pack("<IIQ", 9, 9, 1)]),
        gguf_bytes([text("a") + struct.pack("<IIQ", 9, 0, 2**40)]),
        gguf_bytes([text("a") + struct.pack("<IIQ", 9, 0, 2**24)], data=bytes(2**24)),
        gguf_bytes([text("a") + struct.pack("<IIQ", 9, 77, 1)]),
        gguf_bytes([text("a") + struct.pack("<I", 77)]),
        gguf_bytes([text("a") + struct.pack("<IQ", 8, 2**63)]),
        gguf_bytes([struct.pack("<Q", 2**64 - 1)]),
    ],
    ids=range(22),
)
def test_gguf_files_that_lie(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    started_at = time.monotonic()
    with pytest.raises(ConfigError, match="not a sound"):
        GgufFile(path)
    assert time.monotonic() - started_at < 60.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**63),
        ("embedding_length", 2**63),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 0),
        ("context_length", 2**63),
        ("feed_forward_length", 2**63),
        ("vocab_size", 10**12),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", float("inf")),
        ("attention.key_length", 0),
        ("block_count", float("inf")),
        ("block_count", [1, 2]),
        ("block_count", "many"),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_absurd_gguf_metadata_is_refused_at_once(tmp_path: Path, architecture: str, key: str, value: Any) -> None:
    write_gguf(tmp_path / "model.gguf", {"output_norm.weight": np.ones(48, dtype=np.float32)})
    file = GgufFile(tmp_path / "model.gguf")
    renamed = {name.replace("llama.", f"{architecture}."): known for name, known in file.metadata.items()}
    file.metadata = renamed | {
        "general.architecture": architecture,
        "gemma3.attention.sliding_window": 64,
        f"{architecture}.{key}": value,
    }
    with pytest.raises(ConfigError) as raised:
        gguf_config(file)
    assert len(str(raised.value)) < 400


def test_a_gguf_vocabulary_whose_tokens_are_too_long_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {"output_norm.weight": np.ones(48, dtype=np.float32)})
    file = GgufFile(tmp_path / "model.gguf")
    file.metadata["general.architecture"] = "gemma3"
    file.metadata["tokenizer.ggml.model"] = "llama"
    del file.metadata["tokenizer.ggml.merges"]
    file.metadata["tokenizer.ggml.tokens"][0] = "x" * 1_000_000
    with pytest.raises(ConfigError, match="characters"):
        card_from_gguf(file, name="m", vocab_size=160, context=64)


def test_a_file_without_dimensions_or_of_an_unknown_quantization_is_a_config_error(tmp_path: Path) -> None:
    kind = int(gguf.GGMLQuantizationType.I32)
    (tmp_path / "model.gguf").write_bytes(gguf_bytes([], [tensor("a", [4], kind, 0)], bytes(200)))
    with pytest.raises(ConfigError, match="I32"):
        GgufFile(tmp_path / "model.gguf").tensor("a")
