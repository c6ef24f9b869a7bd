"""Models as a roofline sees them: how many weights, and what a token costs in the cache.

Figures are those of the models' config.json on the Hugging Face hub; numbers of parameters are those of their model
cards. All of these are dense decoders with grouped-query attention.
"""

from typing import NamedTuple

from headrace_shared.errors import ConfigError


class ModelShape(NamedTuple):
    name: str
    num_parameters: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    """Most tokens of a sequence."""

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @property
    def attention_flops_per_pair(self) -> int:
        """Of one query with one key: a product with the key and one with the value, in every head and layer."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 134_515_008, 30, 9, 3, 64, 8192),
        ModelShape("llama-3.2-1b", 1_235_814_400, 16, 32, 8, 64, 131_072),
        ModelShape("qwen3-0.6b", 596_049_920, 28, 16, 8, 128, 40_960),
        ModelShape("mistral-7b", 7_248_023_552, 32, 32, 8, 128, 32_768),
        ModelShape("qwen2.5-7b", 7_615_616_512, 28, 28, 4, 128, 32_768),
        ModelShape("llama-3.1-8b", 8_030_261_248, 32, 32, 8, 128, 131_072),
        ModelShape("qwen3-8b", 8_190_735_360, 36, 32, 8, 128, 40_960),
        ModelShape("qwen3-32b", 32_762_123_264, 64, 64, 8, 128, 40_960),
        ModelShape("llama-3.1-70b", 70_553_706_496, 80, 64, 8, 128, 131_072),
    )
}


def find_shape(name: str, key: str = "gpu_model") -> ModelShape:
    """Raises ConfigError naming `key`."""
    shape = MODELS.get(name)
    if shape is None:
        raise ConfigError(key, f"{name!r} is none of {', '.join(MODELS)}")
    return shape
