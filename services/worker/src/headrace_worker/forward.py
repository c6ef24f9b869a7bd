"""One iteration's inputs to logits: what the engine runs, and the one place that chooses how."""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.adapters.grouped import GroupedAdapters, RowGroup, rows_by_slot
from headrace_worker.adapters.weights import AdapterWeights
from headrace_worker.attention.backend import AttentionBackend
from headrace_worker.attention.cpu import GatherAttention
from headrace_worker.inputs import Inputs
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.communicator import Communicator, SingleRank
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder import Decoder
from headrace_worker.models.decoder_weights import DecoderWeights
from headrace_worker.models.linear import Linear, TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.torch_operations import TorchOperations
from headrace_worker.models.weights import TensorSource
from headrace_worker.native.errors import NativeUnavailable
from headrace_worker.native.forward import NativeForward, why_not_native
from headrace_worker.native.library import Library
from headrace_worker.native.library import load as load_kernels
from headrace_worker.native.packing import Quantization, make_packing

_log = logging.getLogger(__name__)


class Forward(Protocol):
    @property
    def gathered_positions(self) -> int:
        """See `build_inputs`."""
        ...

    @property
    def kernels(self) -> Library | None:
        """The compiled ones, with which sampling draws, too; None: torch computes."""
        ...

    @property
    def reads_unwritten(self) -> bool:
        """Attention multiplies what lies behind a sequence's end, by 0: it has to be finite."""
        ...

    @property
    def folds_norms(self) -> bool:
        """See `Packing`: what multiplies with the rows of a norm is to come with its weights."""
        ...

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        """What the rows of this slot get from now on (`Inputs.row_slots`). None: none has it."""
        ...

    def __call__(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """The logits [sampled slices, vocab_size], in slice order. Writes the new keys and values to the cache. Fills
        `hidden` [hidden rows, hidden_size], float32, with the last hidden states of `Inputs.hidden_rows` as the head
        sees them: without the last norm's weights where those are folded."""
        ...

    def greedy(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor | None:
        """A call that tells only which token is the first of the likeliest ones in each row, [sampled slices] int64, -1
        where logits are not finite. None, and nothing has been done, where that takes the logits anyway."""
        ...


Bind = Callable[[KVCache, int], Forward]
"""(cache, context): the cache is sized when the weights are in memory."""


def load_forward(
    architecture: ModelConfig,
    source: TensorSource,
    *,
    native: str,
    block_size: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[int, int], None],
    deterministic: bool = False,
    quantization: Quantization = Quantization.NONE,
) -> Bind:
    """Reads the weights. `native`: auto (compiled kernels where they can be had) or off. `context`: no sequence will be
    longer. Raises ConfigError if the weights are to be quantized and there are no kernels for that."""
    kernels = None if native == "off" else _kernels(architecture, block_size, context, dtype, device)
    if kernels is None:
        if deterministic:
            raise ConfigError("deterministic", "on a CPU needs compiled kernels, which this model has not here")
        if quantization is not Quantization.NONE:
            raise ConfigError("quantization", f"{quantization} needs compiled kernels, which this model has not here")
        packing = TorchPacking(folds_norms=device.type == "cpu")
        weights = read_decoder(architecture, source, packing, dtype=dtype, device=device, report=report)
        return lambda cache, context: TorchForward(weights, SingleRank(), cache, context)
    own_packing = make_packing(kernels, quantization, architecture.vocab_size)
    packed = read_decoder(architecture, source, own_packing, dtype=own_packing.dtype, device=device, report=report)
    return lambda cache, context: NativeForward(packed, cache, context, kernels)


def _kernels(
    architecture: ModelConfig, block_size: int, context: int, dtype: torch.dtype, device: torch.device
) -> Library | None:
    reason = why_not_native(architecture, block_size=block_size, context=context, dtype=dtype, device=device)
    if reason is not None:
        _log.info("no compiled kernels: %s", reason)
        return None
    try:
        return load_kernels()
    except NativeUnavailable as error:
        _log.warning("no compiled kernels, torch's own are slower: %s", error)
        return None


class TorchForward:
    """One rank's forward pass with torch alone. The cache holds the keys and values of the rank's layers and heads."""

    kernels = None
    reads_unwritten = True

    def __init__(
        self, weights: DecoderWeights[Linear], communicator: Communicator, cache: KVCache, context: int
    ) -> None:
        config, shard = weights.config, weights.shard
        device = cache.pages.device
        self._decoder = Decoder(
            weights, TorchOperations(config.norm_epsilon, device), communicator, context=context, device=device
        )
        self._cache = cache
        self._adapters: dict[int, AdapterWeights] = {}
        self.folds_norms = bool(weights.layers) and weights.layers[0].norms.before_attention is None
        self._attention: AttentionBackend = GatherAttention(
            cache,
            num_heads=len(shard.heads(config)),
            context=context,
            scale=config.attention_scale,
            windows=[config.window(layer) for layer in shard.layers(config)],
        )

    @property
    def gathered_positions(self) -> int:
        return self._attention.gathered_positions

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        if adapter is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = adapter

    def __call__(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        return self.stage(inputs, None, hidden)

    def greedy(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor | None:
        return None

    def stage(self, inputs: Inputs, hidden: Tensor | None, last_hidden: Tensor | None = None) -> Tensor:
        """This pipeline stage's part of an iteration. `hidden`: what the stage before returned, [tokens, hidden_size]
        (it is overwritten); None in the first stage. The last stage returns the logits [sampled slices, vocab_size],
        others hidden states. The last one fills `last_hidden`, as a `Forward` does."""
        cache = self._cache
        if inputs.fresh_blocks.numel():
            cache.clear_blocks(inputs.fresh_blocks)
        prepared = self._attention.prepare(inputs, cache)

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            cache.write(layer, inputs.slots, keys_values)
            return prepared(layer, queries)

        if hidden is None:
            hidden = self._decoder.embed(inputs.token_ids)
        hidden = self._decoder.run(hidden, inputs.positions, attend, self._adapters_of(inputs))
        if not self._decoder.shard.is_last:
            return hidden
        if last_hidden is not None:
            last_hidden.copy_(self._decoder.normalized(hidden[inputs.hidden_rows]))
        return self._decoder.logits(hidden[inputs.sampled_rows])

    def _adapters_of(self, inputs: Inputs) -> GroupedAdapters | None:
        if inputs.row_slots is None:
            return None
        device = inputs.token_ids.device
        found = rows_by_slot(inputs.row_slots)
        return GroupedAdapters(
            [RowGroup(torch.from_numpy(rows).to(device), self._adapters[slot]) for slot, rows in found.items()]
        )
