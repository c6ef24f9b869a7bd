"""What would not be computed as the model's authors meant it is refused, with the key that says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_shared.errors import ConfigError
from headrace_worker.config import EngineConfig, check_model
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.config import ModelConfig, Rope, RopeScaling
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.weights import TensorSource
from headrace_worker.native.forward import why_not_native
from tests.worker.checkpoints import SIZES, load_tiny, save_checkpoint
from tests.worker.families.variants import GEMMA, QWEN3_MOE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported

MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def config_of(family: str, **changes: Any) -> ModelConfig:
    return config_from_hf({**SIZES, "architectures": [f"{family}ForCausalLM"], **changes})


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Gemma2", {}, "Gemma2ForCausalLM"),
        ("Gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("Gemma3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "layer_types names 1 of 3"),
        ("Gemma3", {"query_pre_attn_scalar": -2.0}, "config.json"),
        ("Qwen3Moe", {**MOE, "mlp_only_layers": [1]}, "mlp_only_layers"),
        ("Qwen3Moe", {**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen3Moe", {**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("Qwen3Moe", {}, "moe_intermediate_size"),
        ("Mixtral", {"num_experts_per_tok": 2}, "num_local_experts"),
        ("Mistral", {"sliding_window": 0}, "sliding_window 0"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("Llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, "rope scaling by -1"),
        ("Llama", {"rope_theta": 0.5, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn needs rope_theta"),
        ("Llama", {"rms_norm_eps": None}, "config.json"),
    ],
)
def test_a_configuration_that_cannot_be_run_faithfully(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        config_of(family, **changes)
    assert raised.value.key == "model"


def test_llama3_scaling_needs_room_between_its_frequencies() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(ConfigError, match="high_freq_factor"):
        config_of("Llama", rope_scaling=scaling)


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = config_of("Qwen2", rope_theta=1e6, rope_scaling=scaling)
    assert config.context == 2048
    assert config.rope.scaling is not None
    assert config.rope.scaling.attention_factor == pytest.approx(1.1386294)


def test_older_gemma_files_say_the_same_in_other_words() -> None:
    sizes: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 12}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    old = config_of(
        "Gemma3",
        **sizes,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling=scaling,
        sliding_window_pattern=3,
    )
    new = config_of(
        "Gemma3",
        **sizes,
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    assert old == new
    assert (old.rope_of(0), old.window(0)) == (Rope(theta=1e4), 12)
    assert (old.rope_of(2), old.window(2)) == (
        Rope(theta=1e6, scaling=RopeScaling(kind="linear", factor=8.0)),
        None,
    )
    assert old.ties_embeddings


TENSORS = {
    "gemma": (GEMMA, ["layers.1.pre_feedforward_layernorm.weight", "layers.2.self_attn.q_norm.weight"]),
    "moe": (QWEN3_MOE, ["layers.1.mlp.gate.weight", "layers.2.mlp.experts.7.down_proj.weight"]),
    "qwen2": ({"family": "Qwen2"}, ["layers.0.self_attn.k_proj.bias"]),
}


@pytest.mark.parametrize(("changes", "names"), TENSORS.values(), ids=TENSORS.keys())
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, changes: dict[str, Any], names: list[str]) -> None:
    save_checkpoint(tmp_path, **changes)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in (f"model.{name}" for name in names):
        save_file({**tensors, name: torch.zeros(3, 3)}, file)
        with pytest.raises(ConfigError, match=name):
            load_tiny(tmp_path)
        save_file({key: value for key, value in tensors.items() if key != name}, file)
        with pytest.raises(ConfigError, match=f"lacks {name}"):
            load_tiny(tmp_path)


def test_a_tensor_that_is_missing_at_the_end_is_missed_before_anything_is_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight"):
        read_decoder(
            checkpoint.config,
            Unreadable(checkpoint.source),
            TorchPacking(folds_norms=True),
            dtype=torch.float32,
            device=torch.device("cpu"),
            report=lambda done, total: None,
        )


class Unreadable:
    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.shape = source.shape

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


FITS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Llama", {}, None),
        ("Llama", {"attention_bias": True, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, None),
        ("Qwen2", {}, None),
        ("Mistral", {"sliding_window": 300}, None),
        ("Mistral", {"sliding_window": 299}, "windows"),
        ("Qwen3", {}, "queries and keys"),
        ("Gemma3", {}, "queries and keys"),
        ("Qwen3Moe", MOE, "experts"),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "experts"),
        ("Llama", {"head_dim": 16}, "head size"),
    ],
)
def test_compiled_kernels_are_asked_only_for_what_they_compute(
    family: str, changes: dict[str, Any], reason: str | None
) -> None:
    config = config_of(family, **{**FITS, **changes})
    why = why_not_native(config, block_size=16, context=300, dtype=torch.bfloat16, device=torch.device("cpu"))
    if reason is None:
        assert why is None
    else:
        assert why is not None
        assert reason in why


@pytest.mark.parametrize("changes", [{"quantization": "int4"}, {"quantization": "fp8"}, {"deterministic": True}])
def test_settings_that_experts_do_not_follow_are_refused(changes: dict[str, Any]) -> None:
    settings = EngineConfig(**changes)
    check_model(settings, config_of("Llama", **FITS))
    with pytest.raises(ConfigError, match="mixtures") as caught:
        check_model(settings, config_of("Qwen3Moe", **{**FITS, **MOE}))
    assert caught.value.key in changes
