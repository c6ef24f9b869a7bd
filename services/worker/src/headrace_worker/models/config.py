"""What a checkpoint says about its architecture, in one form whatever family and file it came from.

Every decoder that this engine runs is the same stack: norm, attention, norm, gated multilayer perceptron. What families
do differently is data here, so that one forward pass serves all.
"""

import math
from typing import Any, Literal

from msgspec import Struct

from headrace_shared.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]

MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 13,
    "context": 1 << 27,
}
"""Several times the sizes of the largest model there is: more is a damaged file, or one made to exhaust a machine."""
MAX_EXPERTS = 1 << 13


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the context of pre-training."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear (Chen et al., 2023), llama3 (Llama 3.1), yarn (Peng et al., 2023)."""
    factor: float
    original_context: int = 8192
    low_frequency_factor: float = 1.0
    """llama3: wavelengths longer than original_context / this are stretched in full."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths shorter than original_context / this are kept."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this within the original context are kept."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often are stretched in full."""
    rounds_range: bool = True
    """yarn: the ramp between the two begins and ends at whole pairs."""
    attention_factor: float = 1.0
    """yarn: what rotated queries and keys are multiplied by."""


class Rope(Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al., 2021)."""

    theta: float
    scaling: RopeScaling | None = None
    factors: tuple[float, ...] = ()
    """One divisor for each of the head_dim / 2 frequencies, where a GGUF file brings the scaling ready computed."""


class MixtureConfig(Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of each multilayer perceptron."""

    num_experts: int
    num_chosen: int
    """Experts that compute each token."""
    renormalizes: bool
    """The weights of the chosen experts add up to one."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the multilayer perceptron, or of one expert."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    local_rope: Rope | None = None
    """Of the windowed layers. None: the same as `rope`."""
    sliding_window: int | None = None
    """A query in a windowed layer sees this many positions, its own included."""
    windowed_layers: tuple[bool, ...] = ()
    """Of every layer. Empty: all layers if there is a sliding window."""
    context: int
    """Positions the model can attend to."""
    attention_scale: float
    """What scores are multiplied by."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to the stored weights of all norms."""
    ties_embeddings: bool = False
    """The output head is the embedding matrix."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    """Queries and keys are normalized head by head before they are rotated."""
    has_sandwich_norms: bool = False
    """What attention and perceptron give is normalized once more before it is added to the residual stream."""
    mixture: MixtureConfig | None = None

    def window(self, layer: int) -> int | None:
        """Positions that a query of this layer sees, its own included. None: all up to its own."""
        if self.windowed_layers and not self.windowed_layers[layer]:
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.local_rope is None or self.window(layer) is None else self.local_rope

    @property
    def num_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv_rows, q_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.num_heads * self.head_dim
        attention = (qkv_rows + q_rows) * hidden + self.has_qkv_bias * qkv_rows + self.has_output_bias * hidden
        mlp = 3 * hidden * inner + self.has_mlp_bias * (2 * inner + hidden)
        if self.mixture is not None:
            mlp = self.mixture.num_experts * (mlp + hidden)
        norms = (4 if self.has_sandwich_norms else 2) * hidden + self.has_qk_norm * 2 * self.head_dim
        matrices = 1 if self.ties_embeddings else 2
        return self.num_layers * (attention + mlp + norms) + matrices * self.vocab_size * hidden + hidden

    def kv_bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size


def checked(config: ModelConfig) -> ModelConfig:
    """Raises ConfigError for sizes that do not fit together."""
    for name, most in MOST.items():
        if not 1 <= getattr(config, name) <= most:
            raise ConfigError("model", f"{name} in the model's configuration is not from 1 to {most}")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError("model", f"{config.num_heads} heads cannot share {config.num_kv_heads} key-value heads")
    if config.head_dim % 2:
        raise ConfigError("model", f"head_dim {config.head_dim} is odd: no rotary embedding fits")
    if config.sliding_window is not None and not 1 <= config.sliding_window <= MOST["context"]:
        raise ConfigError("model", f"sliding_window {config.sliding_window} is not from 1 to {MOST['context']}")
    if config.windowed_layers and len(config.windowed_layers) != config.num_layers:
        raise ConfigError("model", f"layer_types names {len(config.windowed_layers)} of {config.num_layers} layers")
    if not (math.isfinite(config.norm_epsilon) and config.norm_epsilon >= 0):
        raise ConfigError("model", f"the epsilon of the norms, {config.norm_epsilon}, is no small number")
    if not math.isfinite(config.attention_scale) or config.attention_scale <= 0:
        raise ConfigError("model", f"the scale of attention, {config.attention_scale}, is not positive")
    if config.mixture is not None and not (1 <= config.mixture.num_chosen <= config.mixture.num_experts <= MAX_EXPERTS):
        raise ConfigError(
            "model", f"num_experts_per_tok {config.mixture.num_chosen} of {config.mixture.num_experts} experts"
        )
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            _check_rope(rope, config.head_dim)
    return config


def _check_rope(rope: Rope, head_dim: int) -> None:
    if not math.isfinite(rope.theta) or rope.theta <= 0:
        raise ConfigError("model", f"rope_theta {rope.theta} is not positive")
    if rope.factors and (len(rope.factors) != head_dim // 2 or not all(factor > 0 for factor in rope.factors)):
        raise ConfigError("model", f"{len(rope.factors)} rope factors do not fit heads of {head_dim}")
    scaling = rope.scaling
    if scaling is None:
        return
    numbers = (
        scaling.low_frequency_factor,
        scaling.high_frequency_factor,
        scaling.beta_fast,
        scaling.beta_slow,
        scaling.attention_factor,
    )
    if not all(map(math.isfinite, numbers)):
        raise ConfigError("model", "a number of the rope scaling is not finite")
    if not (math.isfinite(scaling.factor) and scaling.factor > 0 and 0 < scaling.original_context <= MOST["context"]):
        raise ConfigError("model", f"rope scaling by {scaling.factor} from {scaling.original_context} is not positive")
    if scaling.kind == "llama3" and scaling.high_frequency_factor <= scaling.low_frequency_factor:
        raise ConfigError("model", "high_freq_factor of the rope scaling is not above low_freq_factor")
    if scaling.kind == "yarn" and (rope.theta <= 1 or min(scaling.beta_fast, scaling.beta_slow) <= 0):
        raise ConfigError("model", "yarn needs rope_theta above 1, and beta_fast and beta_slow above 0")


UNSOUND = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What values of types and sizes that nobody meant provoke while a configuration is read."""


def num_layers_of(value: Any) -> int:
    """Checked before anything is made for each layer. Raises ConfigError, TypeError, ValueError."""
    if not 1 <= int(value) <= MOST["num_layers"]:
        raise ConfigError("model", f"the number of layers is not from 1 to {MOST['num_layers']}")
    return int(value)
