"""Rotary embeddings from the config.json of a Hugging Face checkpoint."""

import math
from collections.abc import Mapping
from typing import Any

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import Rope, RopeScaling


def rope_from_hf(raw: Mapping[str, Any], parameters: Mapping[str, Any] | None, default_theta: float) -> Rope:
    """`parameters`: rope_parameters of config.json, or rope_scaling of older ones, which keep rope_theta outside.
    Raises ConfigError for a scaling that is not supported, KeyError, TypeError or ValueError for an unsound one."""
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
