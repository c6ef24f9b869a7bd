"""What an adapter says about itself: adapter_config.json as PEFT writes it. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_shared.errors import HeadraceError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "rank_pattern": "ranks that differ between modules (rank_pattern)",
    "alpha_pattern": "scales that differ between modules (alpha_pattern)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "lora_bias": "biases (lora_bias)",
    "trainable_token_indices": "embeddings of tokens (trainable_token_indices)",
    "target_parameters": "parameters that are no linear layers (target_parameters)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
}
"""Keys that must be absent, null, false or empty, and what they mean."""


class AdapterRefused(HeadraceError):
    """The adapter is not one that can be served here. The message is for whoever wanted it loaded."""


class AdapterConfig(NamedTuple):
    rank: int
    scale: float
    """What the product of both matrices is multiplied by."""
    targets: frozenset[str] | None
    """Names of linear layers, some of TARGETS. None: whatever the weights hold."""


def parse_config(data: bytes, max_rank: int) -> AdapterConfig:
    """Raises AdapterRefused for what would not be computed as the adapter's authors meant it."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused("adapter_config.json is no JSON") from error
    if not isinstance(raw, dict):
        raise AdapterRefused("adapter_config.json is no JSON object")
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterRefused(f"its peft_type is {_short(kind)}, not LORA")
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise AdapterRefused(f"it has {what}, which is not served")
    if raw.get("bias", "none") not in (None, "none"):
        raise AdapterRefused("it has biases, which are not served")
    rank = raw.get("r")
    if type(rank) is not int or rank < 1:
        raise AdapterRefused(f"its rank r is {_short(rank)}, not a positive integer")
    if rank > max_rank:
        raise AdapterRefused(f"its rank {rank} exceeds {max_rank}, the most that this worker serves (--max-lora-rank)")
    return AdapterConfig(rank, _scale(raw, rank), _targets(raw.get("target_modules")))


def _scale(raw: Mapping[str, Any], rank: int) -> float:
    """alpha / r (Hu et al., 2021), or alpha / sqrt(r) (rsLoRA, Kalajdzievski, 2023)."""
    alpha = raw.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e6:
        raise AdapterRefused(f"its lora_alpha is {_short(alpha)}, not a number of moderate size")
    return float(alpha) / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _targets(given: Any) -> frozenset[str] | None:
    if given is None or isinstance(given, str):
        return None  # an expression for names: the weights tell which
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise AdapterRefused("its target_modules is no list of names")
    names = frozenset(name.rpartition(".")[2] for name in given)
    if other := sorted(names.difference(TARGETS)):
        raise AdapterRefused(f"it changes {_short(other[0])}; only {', '.join(TARGETS)} are served")
    return names


def _short(value: Any) -> str:
    return repr(value)[:64]
