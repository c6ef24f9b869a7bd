"""Checkpoint folders: what is opened and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import ModelConfig, RopeScaling
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.models.weights import SafetensorsFolder
from tests.worker.checkpoints import SIZES, load_tiny, save_checkpoint
from tests.worker.engine_driver import generate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one")
    save_checkpoint(tmp_path / "many", shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_tiny(tmp_path / "one"), load_tiny(tmp_path / "many")
    assert generate(one, [3, 4, 5], 8) == generate(many, [3, 4, 5], 8)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=gone.name):
        load_tiny(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_a_broken_index_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError):
        SafetensorsFolder(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is not opened"):
        SafetensorsFolder(tmp_path)


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match=name):
        load_tiny(tmp_path)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        load_tiny(tmp_path)


BASE: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **SIZES}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"num_attention_heads": 5}, "share"),
        ({"head_dim": 7}, "odd"),
        ({"vocab_size": 0}, "vocab_size .* from 1"),
        ({"vocab_size": "many"}, "config.json"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_what_cannot_be_run_faithfully_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_hf({**BASE, **changes})


def test_old_and_new_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = config_from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = config_from_hf({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert old.rope.scaling == RopeScaling(kind="llama3", factor=8.0)
    assert old.rope.theta == 5e5


def test_sliding_windows_are_of_the_layers_that_the_family_says() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8000}
    config = config_from_hf({**mistral, "sliding_window": 4096})
    assert (config.context, [config.window(layer) for layer in range(3)]) == (8000, [4096] * 3)
    assert config_from_hf({**mistral, "sliding_window": None}).sliding_window is None
    assert config_from_hf(mistral).sliding_window == 4096, "the family's first members do not always say so"
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 2}
    assert config_from_hf(qwen).sliding_window is None, "not in use"
    used = config_from_hf({**qwen, "use_sliding_window": True})
    assert [used.window(layer) for layer in range(3)] == [None, None, 64]


def test_sizes_follow_from_the_configuration(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, tie_word_embeddings=True)
    config: ModelConfig = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert config.kv_bytes_per_token(2) == 3 * 2 * 2 * 8 * 2
