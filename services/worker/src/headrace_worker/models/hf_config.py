"""From the config.json of a Hugging Face checkpoint, by family.

What this engine would not compute as the model's authors meant it is refused here, with the key that says so, before
any weight is read.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import UNSOUND, Activation, MixtureConfig, ModelConfig, Rope, checked, num_layers_of
from headrace_worker.models.hf_rope import rope_from_hf

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNSUPPORTED = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "mlp_only_layers",
)
"""Keys that must be absent, null, false or empty."""


_GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
"""What files of Gemma models that see images do not say about their text part if it is so."""


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """From the contents of config.json. Raises ConfigError for what this engine cannot run faithfully."""
    try:
        return _config(raw)
    except UNSOUND as error:
        raise ConfigError("model", f"config.json is incomplete or wrong: {error!r:.200}") from error


def _config(raw: Mapping[str, Any]) -> ModelConfig:
    architecture = (list(raw.get("architectures") or []) or ["(none)"])[0]
    family = _FAMILIES.get(architecture)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ConfigError("model", f"architecture {str(architecture)[:64]} is not supported (only {known})")
    _check_supported(raw)
    if isinstance(text := raw.get("text_config"), Mapping):
        raw = {**_GEMMA3_TEXT, **text}
        _check_supported(raw)
    return checked(ModelConfig(**(_common(raw) | family(raw))))


def _check_supported(raw: Mapping[str, Any]) -> None:
    for key in _UNSUPPORTED:
        if raw.get(key):
            hint = "; use the GGUF file or the original weights" if key == "quantization_config" else ""
            raise ConfigError("model", f"{key} in config.json is not supported{hint}")
    if raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("model", "decoder_sparse_step in config.json is not supported (only 1)")


def _common(raw: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = int(raw["num_attention_heads"])
    hidden_size = int(raw["hidden_size"])
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    rope = rope_from_hf(raw, raw.get("rope_parameters") or raw.get("rope_scaling"), 10000.0)
    return {
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": num_layers_of(raw["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
        "head_dim": head_dim,
        "norm_epsilon": float(raw["rms_norm_eps"]),
        "rope": rope,
        "context": _context(raw, rope),
        "attention_scale": head_dim**-0.5,
        "activation": _activation(raw, "hidden_act", "silu"),
        "ties_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(raw.get("attention_bias", False))
    return {
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    # What the first of the family had; its successors say null.
    return {"sliding_window": _window({"sliding_window": 4096, **raw})}


def _mixtral(raw: Mapping[str, Any]) -> dict[str, Any]:
    mixture = MixtureConfig(
        num_experts=int(raw["num_local_experts"]), num_chosen=int(raw["num_experts_per_tok"]), renormalizes=True
    )
    return {"sliding_window": _window(raw), "mixture": mixture}


def _qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"has_qkv_bias": True, **_late_windows(raw)}


def _qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(raw.get("attention_bias", False))
    # The family's heads are 128 wide whatever the hidden size, also where the file does not say so.
    head_dim = int(raw.get("head_dim") or 128)
    return {
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "has_qk_norm": True,
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        **_late_windows(raw),
    }


def _qwen3_moe(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(raw.get("attention_bias", False))
    return {
        "intermediate_size": int(raw["moe_intermediate_size"]),
        "has_qk_norm": True,
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "sliding_window": _window(raw) if raw.get("use_sliding_window") else None,
        "mixture": MixtureConfig(
            num_experts=int(raw.get("num_experts") or raw["num_local_experts"]),
            num_chosen=int(raw["num_experts_per_tok"]),
            renormalizes=bool(raw.get("norm_topk_prob", False)),
        ),
    }


def _gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = bool(raw.get("attention_bias", False))
    num_layers = int(raw["num_hidden_layers"])
    pattern = int(raw.get("sliding_window_pattern") or 6)
    types = raw.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)
    ]
    head_dim = int(raw.get("head_dim") or 256)
    ropes = raw.get("rope_parameters") or {}
    if "full_attention" in ropes:
        rope = rope_from_hf(raw, ropes["full_attention"], 1_000_000.0)
        local = rope_from_hf({}, ropes["sliding_attention"], 10_000.0)
    else:
        # Older files: the scaling is of the global layers only.
        rope = rope_from_hf(raw, ropes or raw.get("rope_scaling"), 1_000_000.0)
        local = Rope(theta=float(raw.get("rope_local_base_freq") or 10_000.0))
    return {
        "head_dim": head_dim,
        "rope": rope,
        "local_rope": local,
        "sliding_window": _window(raw),
        "windowed_layers": _windowed(types),
        "attention_scale": float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        "activation": _activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": math.sqrt(int(raw["hidden_size"])),
        "norm_offset": 1.0,
        # Untied heads are written out; the default is not.
        "ties_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_qk_norm": True,
        "has_sandwich_norms": True,
    }


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Gemma3ForCausalLM": _gemma3,
    # The text part alone.
    "Gemma3ForConditionalGeneration": _gemma3,
}


def _activation(raw: Mapping[str, Any], key: str, default: str) -> Activation:
    name = raw.get(key) or default
    if name not in _ACTIVATIONS:
        raise ConfigError("model", f"{key} {name!r} is not supported (only {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def _window(raw: Mapping[str, Any]) -> int | None:
    value = raw.get("sliding_window")
    return None if value is None else int(value)


def _context(raw: Mapping[str, Any], rope: Rope) -> int:
    """Files of models that may be stretched by yarn keep the unstretched number."""
    context = int(raw["max_position_embeddings"])
    if rope.scaling is not None and rope.scaling.kind == "yarn":
        context = max(context, int(rope.scaling.original_context * rope.scaling.factor))
    return context


def _late_windows(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's windows, where they are in use: of the layers from `max_window_layers` on."""
    window = _window(raw) if raw.get("use_sliding_window") else None
    if window is None:
        return {}
    num_layers = int(raw["num_hidden_layers"])
    first = int(raw.get("max_window_layers", 28))
    types = raw.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return {"sliding_window": window, "windowed_layers": _windowed(types)}


def _windowed(types: list[Any]) -> tuple[bool, ...]:
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise ConfigError("model", f"layer_types: {name!r} is not supported")
    return tuple(name == "sliding_attention" for name in types)
