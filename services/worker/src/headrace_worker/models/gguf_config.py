"""From the metadata of a GGUF file, by family. The rest of a model's description is in which tensors the file has.

Refuses what this engine would not compute as the model's authors meant it, before any weight is read.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import UNSOUND, ModelConfig, Rope, RopeScaling, checked, num_layers_of
from headrace_worker.models.gguf import GgufFile
from headrace_worker.models.hf_rope import yarn_attention

_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_PATTERN = 6
"""Every sixth layer is global. Neither number is in the files."""
_GEMMA3_27B_LAYERS = 62
"""Its heads are 128 wide, but its scores are scaled by the hidden size over the number of heads."""


def gguf_config(file: GgufFile) -> ModelConfig:
    """Raises ConfigError for what this engine cannot run faithfully."""
    try:
        return _config(file)
    except UNSOUND as error:
        raise ConfigError("model", f"the GGUF file's metadata is incomplete or wrong: {error!r:.200}") from error


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    family = _FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        shown, known = repr(architecture)[:64], ", ".join(_FAMILIES)
        raise ConfigError("model", f"GGUF architecture {shown} is not supported (only {known})")
    fields = _Fields(file, str(architecture))
    for key in ("expert_count", "attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key):
            raise ConfigError("model", f"{fields.key(key)} is not supported in GGUF files")
    return checked(ModelConfig(**(_common(fields) | family(fields))))


class _Fields:
    """The metadata of one architecture, by keys without its prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.metadata: Mapping[str, Any] = file.metadata
        self._architecture = architecture

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def get(self, name: str) -> Any:
        return self.metadata.get(self.key(name))

    def need(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(self.key(name), default)
        if value is None:
            raise ConfigError("model", f"the GGUF file lacks {self.key(name)}")
        return value


def _common(fields: _Fields) -> dict[str, Any]:
    num_heads = int(fields.need("attention.head_count"))
    hidden_size = int(fields.need("embedding_length"))
    head_dim = int(fields.need("attention.key_length", hidden_size // num_heads))
    if int(fields.need("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError("model", f"{fields.key('rope.dimension_count')} is not supported (only the whole head)")
    if int(fields.need("attention.value_length", head_dim)) != head_dim:
        raise ConfigError("model", f"{fields.key('attention.value_length')} is not supported (only that of the keys)")
    tensors = fields.file.tensors
    return {
        "vocab_size": int(fields.get("vocab_size") or len(fields.metadata["tokenizer.ggml.tokens"])),
        "hidden_size": hidden_size,
        "intermediate_size": int(fields.need("feed_forward_length")),
        "num_layers": num_layers_of(fields.need("block_count")),
        "num_heads": num_heads,
        "num_kv_heads": int(fields.need("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "norm_epsilon": float(fields.need("attention.layer_norm_rms_epsilon")),
        "rope": _rope(fields, 10_000.0),
        "context": int(fields.need("context_length")),
        "attention_scale": head_dim**-0.5,
        "ties_embeddings": "output.weight" not in tensors,
        "has_qkv_bias": "blk.0.attn_q.bias" in tensors,
        "has_output_bias": "blk.0.attn_output.bias" in tensors,
        "has_mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _plain(fields: _Fields) -> dict[str, Any]:
    return {}


def _qwen3(fields: _Fields) -> dict[str, Any]:
    return {"has_qk_norm": True}


def _gemma3(fields: _Fields) -> dict[str, Any]:
    num_layers, hidden_size = int(fields.need("block_count")), int(fields.need("embedding_length"))
    num_heads = int(fields.need("attention.head_count"))
    scaled_dim = int(fields.need("attention.key_length", 256))
    if num_layers == _GEMMA3_27B_LAYERS:
        scaled_dim = hidden_size // num_heads
    return {
        "rope": _rope(fields, 1_000_000.0),
        "local_rope": Rope(theta=float(fields.need("rope.freq_base_swa", _GEMMA3_LOCAL_THETA))),
        "sliding_window": int(fields.need("attention.sliding_window")),
        "windowed_layers": tuple((layer + 1) % _GEMMA3_PATTERN != 0 for layer in range(num_layers)),
        "attention_scale": scaled_dim**-0.5,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden_size),
        # Whoever writes these files has added the 1 to the norms' weights already.
        "norm_offset": 0.0,
        "has_qk_norm": True,
        "has_sandwich_norms": True,
    }


_FAMILIES: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _plain,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _rope(fields: _Fields, default_theta: float) -> Rope:
    tensors = fields.file.tensors
    factors = fields.file.tensor("rope_freqs.weight").tolist() if "rope_freqs.weight" in tensors else ()
    theta = float(fields.need("rope.freq_base", default_theta))
    return Rope(theta=theta, scaling=_scaling(fields), factors=tuple(factors))


def _scaling(fields: _Fields) -> RopeScaling | None:
    kind = fields.need("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = float(fields.need("rope.scaling.factor", 1.0))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        original = int(fields.need("rope.scaling.original_context_length"))
        return RopeScaling(
            kind="yarn", factor=factor, original_context=original, attention_factor=yarn_attention(factor)
        )
    raise ConfigError("model", f"{fields.key('rope.scaling.type')} {kind!r} is not supported (only linear and yarn)")
