"""The engine's forward pass on the compiled kernels: a whole iteration is one call, without Python in between."""

import torch
from torch import Tensor

from headrace_worker.huge_pages import Arena
from headrace_worker.inputs import Inputs
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import LlamaConfig
from headrace_worker.models.llama_weights import LlamaWeights
from headrace_worker.models.rotary import rotary_table
from headrace_worker.native.attention import PagedBatch
from headrace_worker.native.library import Library
from headrace_worker.native.model import NativeLayer, NativeMatrix, NativeModel, NativeShape, pack, pack_gate_up


def why_not_native(config: LlamaConfig, *, block_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels would not serve this model. None: they would."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"they are for bfloat16 on the CPU, not {dtype} on {device.type}"
    try:
        _shape(config, block_size).check()
    except ValueError as error:
        return str(error)
    return None


class NativePacking:
    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels
        self._arena = Arena()

    def linear(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return pack(weight.contiguous(), bias, self._kernels, self._arena)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix:
        return pack_gate_up(weight.contiguous(), bias, self._kernels, self._arena)


class NativeForward:
    gathered_positions = 0

    def __init__(self, weights: LlamaWeights[NativeMatrix], cache: KVCache, context: int, kernels: Library) -> None:
        self._block_size = cache.block_size
        self._model = NativeModel(
            _shape(weights.config, cache.block_size),
            [NativeLayer(*layer) for layer in weights.layers],
            weights.embedding.contiguous(),
            weights.head,
            rotary_table(weights.config, context),
            cache.pages.unbind(0),
            kernels,
        )

    def __call__(self, inputs: Inputs) -> Tensor:
        # Positions that nobody has written are never read, so no block needs to be cleared first.
        batch = PagedBatch(*inputs.ragged, block_size=self._block_size)
        return self._model.logits(inputs.token_ids, inputs.positions, inputs.slots, inputs.sampled_rows, batch)


def _shape(config: LlamaConfig, block_size: int) -> NativeShape:
    return NativeShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=block_size,
        epsilon=config.norm_epsilon,
        scale=config.head_dim**-0.5,
    )
