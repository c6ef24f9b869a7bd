"""What a checkpoint says about its architecture, in one form whatever file it came from."""

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from headrace_shared.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
SUPPORTED_GGUF_ARCHITECTURES = ("llama",)


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the context of pre-training."""

    kind: str
    """linear (Chen et al., 2023) or llama3."""
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


class LlamaConfig(Struct, frozen=True, kw_only=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] = ()
    """One divisor for each of the head_dim / 2 frequencies, where a GGUF file brings the scaling ready computed."""
    context: int
    """Positions the model can attend to."""
    ties_embeddings: bool = False
    """The output head is the embedding matrix."""
    has_attention_bias: bool = False
    has_mlp_bias: bool = False

    @property
    def num_parameters(self) -> int:
        heads = self.num_heads * 2 + self.num_kv_heads * 2
        layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size + 2)
        matrices = 1 if self.ties_embeddings else 2
        return self.num_layers * layer + matrices * self.vocab_size * self.hidden_size + self.hidden_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size


def config_from_hf(raw: Mapping[str, Any]) -> LlamaConfig:
    """From the contents of config.json. Raises ConfigError for what this engine cannot run faithfully."""
    architecture = (list(raw.get("architectures") or []) or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            "model", f"architecture {architecture} is not supported (only {', '.join(SUPPORTED_ARCHITECTURES)})"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError("model", f"activation {activation} is not supported")
    if raw.get("quantization_config"):
        raise ConfigError("model", "quantized checkpoints are not supported; use the GGUF file or the original weights")
    try:
        context = int(raw["max_position_embeddings"])
        if sliding_window := raw.get("sliding_window"):
            # Within the window, windowed and full attention are the same.
            context = min(context, int(sliding_window))
        num_heads = int(raw["num_attention_heads"])
        hidden_size = int(raw["hidden_size"])
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        return _checked(
            LlamaConfig(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw["intermediate_size"]),
                num_layers=int(raw["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
                head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
                norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
                rope_scaling=_rope_scaling(rope),
                context=context,
                ties_embeddings=bool(raw.get("tie_word_embeddings", False)),
                has_attention_bias=bool(raw.get("attention_bias", False)),
                has_mlp_bias=bool(raw.get("mlp_bias", False)),
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("model", f"config.json is incomplete or wrong: {error!r}") from error


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
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
    raise ConfigError("model", f"rope scaling {kind!r} is not supported (only linear and llama3)")


def config_from_gguf(
    metadata: Mapping[str, Any], *, ties_embeddings: bool, rope_factors: tuple[float, ...] = ()
) -> LlamaConfig:
    """From a GGUF file's metadata. Raises ConfigError for what this engine cannot run faithfully."""
    architecture = metadata.get("general.architecture")
    if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
        raise ConfigError("model", f"GGUF architecture {architecture!r} is not supported (only llama)")
    if metadata.get("llama.expert_count"):
        raise ConfigError("model", "mixture-of-experts models are not supported")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise ConfigError("model", f"the GGUF file lacks llama.{name}")
        return value

    try:
        num_heads = int(field("attention.head_count"))
        hidden_size = int(field("embedding_length"))
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ConfigError("model", f"rope scaling {scaling!r} is not supported in GGUF files")
        factor = float(metadata.get("llama.rope.scaling.factor", 1.0))
        return _checked(
            LlamaConfig(
                vocab_size=int(metadata.get("llama.vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
                hidden_size=hidden_size,
                intermediate_size=int(field("feed_forward_length")),
                num_layers=int(field("block_count")),
                num_heads=num_heads,
                num_kv_heads=int(field("attention.head_count_kv", num_heads)),
                head_dim=int(field("attention.key_length", hidden_size // num_heads)),
                norm_epsilon=float(field("attention.layer_norm_rms_epsilon")),
                rope_theta=float(field("rope.freq_base", 10000.0)),
                rope_scaling=RopeScaling(kind="linear", factor=factor) if scaling == "linear" else None,
                rope_factors=rope_factors,
                context=int(field("context_length")),
                ties_embeddings=ties_embeddings,
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("model", f"the GGUF file's metadata is incomplete or wrong: {error!r}") from error


def _checked(config: LlamaConfig) -> LlamaConfig:
    sizes = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads)
    if min(*sizes, config.num_kv_heads, config.head_dim, config.context) < 1:
        raise ConfigError("model", "a size in the model's configuration is not positive")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError("model", f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ConfigError("model", f"head_dim {config.head_dim} is odd: no rotary embedding fits")
    if not math.isfinite(config.rope_theta) or config.rope_theta <= 0:
        raise ConfigError("model", f"rope_theta {config.rope_theta} is not positive")
    return config
