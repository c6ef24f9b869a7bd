"""From the config.json of a Hugging Face checkpoint, by family.

What this engine would not compute as the model's authors meant it is refused here, with the key that says so, before
any weight is read.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import Activation, MixtureConfig, ModelConfig, Rope, RopeScaling, checked

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNSUPPORTED = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "mlp_only_layers",
)
"""Keys that must be absent, null, false or empty."""


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """From the contents of config.json. Raises ConfigError for what this engine cannot run faithfully."""
    architecture = (list(raw.get("architectures") or []) or ["(none)"])[0]
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ConfigError("model", f"architecture {architecture} is not supported (only {', '.join(_FAMILIES)})")
    _check_supported(raw)
    try:
        return checked(ModelConfig(**(_common(raw) | family(raw))))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("model", f"config.json is incomplete or wrong: {error!r}") from error


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
    rope = _rope(raw, raw.get("rope_parameters") or raw.get("rope_scaling"), 10000.0)
    return {
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
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
        rope = _rope(raw, ropes["full_attention"], 1_000_000.0)
        local = _rope({}, ropes["sliding_attention"], 10_000.0)
    else:
        # Older files: the scaling is of the global layers only.
        rope = _rope(raw, ropes or raw.get("rope_scaling"), 1_000_000.0)
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


def _rope(raw: Mapping[str, Any], parameters: Mapping[str, Any] | None, default_theta: float) -> Rope:
    """`parameters`: rope_parameters, or rope_scaling of older files, which keep rope_theta outside."""
    rope = dict(parameters or {})
    for source in (rope, raw):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError("model", "partial_rotary_factor in config.json is not supported (only 1)")
    theta = rope.get("rope_theta")
    if theta is None:
        theta = raw.get("rope_theta")
    return Rope(theta=float(default_theta if theta is None else theta), scaling=_scaling(rope, raw))


def _scaling(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_context=int(rope["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return _yarn(rope, raw)
    raise ConfigError("model", f"rope_type {kind!r} is not supported (only default, linear, llama3 and yarn)")


def _yarn(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling:
    original = int(rope.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    given = rope.get("factor")
    factor = float(raw["max_position_embeddings"]) / original if given is None else float(given)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = yarn_attention(factor, float(mscale)) / yarn_attention(factor, float(all_dim))
        else:
            attention_factor = yarn_attention(factor)
    truncates = rope.get("truncate")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        rounds_range=truncates is None or bool(truncates),
        attention_factor=float(attention_factor),
    )


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """What queries and keys are multiplied by for a context that was stretched by `factor` (Peng et al., 2023, eq. 22
    gives the square, for the scores)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
