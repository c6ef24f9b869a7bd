"""What the engine asks of an attention implementation."""

from typing import Protocol

from torch import Tensor

from headrace_worker.inputs import Inputs
from headrace_worker.kv_cache import KVCache


class PreparedAttention(Protocol):
    """Attention over one iteration's batch; everything that is the same in all layers is computed beforehand."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """queries [tokens, num_heads, head_dim] -> [tokens, num_heads * head_dim].

        The batch's own keys and values are in the cache already."""
        ...


class AttentionBackend(Protocol):
    @property
    def gathered_positions(self) -> int:
        """The size of groups that suits this backend (see `build_inputs`)."""
        ...

    def prepare(self, inputs: Inputs, cache: KVCache) -> PreparedAttention: ...
