"""GGUF files: parsing, dequantization, and files that are not sound."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.gguf_config import gguf_config
from headrace_worker.models.gguf_tensors import GgufTensors
from tests.worker.checkpoints import SIZES, load_tiny, save_checkpoint
from tests.worker.engine_driver import generate
from tests.worker.tiny_gguf import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


def gguf_from_checkpoint(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors as llama.cpp's converter writes them: queries and keys with the halves of each head interleaved."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = array
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = array
        elif name == "lm_head.weight":
            tensors["output.weight"] = array
        else:
            _, _, layer, *part, suffix = name.split(".")
            own = names[".".join(part)]
            if own in ("attn_q", "attn_k"):
                heads = SIZES["num_attention_heads" if own == "attn_q" else "num_key_value_heads"]
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            tensors[f"blk.{layer}.{own}.{suffix}"] = np.ascontiguousarray(array)
    return tensors


def test_a_gguf_file_is_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, tie_word_embeddings=False)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, gguf_from_checkpoint(model))
    file = GgufFile(path)
    tensors = GgufTensors(file, gguf_config(file))
    for name, value in model.state_dict().items():
        assert torch.equal(tensors.read(name), value), name
    prompt = [3, 50, 100, 7, 9]
    assert generate(load_tiny(path), prompt, 12) == generate(load_tiny(tmp_path), prompt, 12)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_0", "BF16"])
def test_quantized_tensors_are_close_to_their_originals(tmp_path: Path, kind: str) -> None:
    original = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("t", gguf.quants.quantize(original, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "q.gguf").tensor("t")
    assert tensor.shape == (6, 64)
    tolerance = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.03, "Q4_1": 0.25, "Q4_0": 0.4}[kind]
    assert float((tensor - torch.from_numpy(original)).abs().max()) < tolerance


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.gguf"
    write_gguf(path, {"output_norm.weight": np.ones(48, dtype=np.float32)})
    return path


def test_metadata_is_what_was_written(sound: Path) -> None:
    metadata = GgufFile(sound).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.embedding_length"] == 48
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["tokenizer.ggml.tokens"][:2] == ["a", "b"]


def test_any_truncation_is_a_config_error(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    for length in (0, 3, 4, 12, 24, 40, len(data) // 2, len(data) - 1):
        short = tmp_path / "short.gguf"
        short.write_bytes(data[:length])
        with pytest.raises(ConfigError):
            GgufFile(short)


def test_damaged_headers_raise_nothing_but_config_errors(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for position in rng.integers(0, 400, 3):
            damaged[position] = rng.integers(0, 256)
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            gguf_config(GgufFile(path))
        except ConfigError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("count", [2**20 + 1, 2**63])
def test_absurd_counts_are_refused_before_anything_is_read(tmp_path: Path, count: int) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 0) + bytes(100))
    with pytest.raises(ConfigError, match="entries"):
        GgufFile(path)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="gpt2"):
        gguf_config(GgufFile(path))
