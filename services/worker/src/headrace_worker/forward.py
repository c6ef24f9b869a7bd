"""One iteration's inputs to logits: what the engine runs, and the one place that chooses how."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace_worker.attention.backend import AttentionBackend
from headrace_worker.attention.cpu import GatherAttention
from headrace_worker.inputs import Inputs
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import LlamaConfig
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.llama import Llama
from headrace_worker.models.llama_weights import read_llama
from headrace_worker.models.rotary import rotary_table
from headrace_worker.models.weights import TensorSource
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.forward import NativeForward, NativePacking, why_not_native
from headrace_worker.native.library import Library
from headrace_worker.native.library import load as load_kernels

_log = logging.getLogger(__name__)


class Forward(Protocol):
    @property
    def gathered_positions(self) -> int:
        """See `build_inputs`."""
        ...

    def __call__(self, inputs: Inputs) -> Tensor:
        """The logits [sampled slices, vocab_size], in slice order. Writes the new keys and values to the cache."""
        ...


Bind = Callable[[KVCache, int], Forward]
"""(cache, context): the cache is sized when the weights are in memory."""


def load_forward(
    architecture: LlamaConfig,
    source: TensorSource,
    *,
    native: str,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
) -> Bind:
    """Reads the weights. `native`: auto (compiled kernels where they can be had) or off."""
    kernels = None if native == "off" else _kernels(architecture, block_size, dtype, device)
    if kernels is None:
        weights = read_llama(architecture, source, TorchPacking(), dtype=dtype, device=device, report=report)
        return lambda cache, context: TorchForward(Llama(weights), cache, context)
    packed = read_llama(architecture, source, NativePacking(kernels), dtype=dtype, device=device, report=report)
    return lambda cache, context: NativeForward(packed, cache, context, kernels)


def _kernels(architecture: LlamaConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> Library | None:
    if (reason := why_not_native(architecture, block_size=block_size, dtype=dtype, device=device)) is not None:
        _log.info("no compiled kernels: %s", reason)
        return None
    try:
        return load_kernels()
    except NativeUnavailable as error:
        _log.warning("no compiled kernels, torch's own are slower: %s", error)
        return None


class TorchForward:
    def __init__(self, model: Llama, cache: KVCache, context: int) -> None:
        self._model = model
        self._cache = cache
        self._rotations = rotary_table(model.config, context).unsqueeze(1).to(cache.pages.device)
        self._attention: AttentionBackend = GatherAttention(cache, num_heads=model.config.num_heads, context=context)

    @property
    def gathered_positions(self) -> int:
        return self._attention.gathered_positions

    def __call__(self, inputs: Inputs) -> Tensor:
        cache = self._cache
        if inputs.fresh_blocks.numel():
            cache.clear_blocks(inputs.fresh_blocks)
        prepared = self._attention.prepare(inputs, cache)

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            cache.write(layer, inputs.slots, keys_values)
            return prepared(layer, queries)

        hidden = self._model.hidden_states(inputs.token_ids, self._rotations[inputs.positions], attend)
        return self._model.logits(hidden[inputs.sampled_rows])
