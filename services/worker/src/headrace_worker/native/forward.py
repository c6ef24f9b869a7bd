"""The engine's forward pass on the compiled kernels: a whole iteration is one call, without Python in between."""

import torch
from torch import Tensor

from headrace_worker.adapters.weights import AdapterWeights
from headrace_worker.inputs import Inputs
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder_weights import DecoderWeights, Layer, Mlp
from headrace_worker.models.rotary import rotary_table
from headrace_worker.native.adapters import pack_adapter
from headrace_worker.native.attention import PagedBatch
from headrace_worker.native.library import Library
from headrace_worker.native.model import NativeLayer, NativeMatrix, NativeModel, NativeShape


def why_not_native(
    config: ModelConfig, *, block_size: int, context: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernels would not serve this model up to `context` positions. None: they would."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"they are for bfloat16 on the CPU, not {dtype} on {device.type}"
    windows = [window for layer in range(config.num_layers) if (window := config.window(layer)) is not None]
    for has_it, what in (
        (config.mixture is not None, "a mixture of experts"),
        (config.has_qk_norm, "norms of queries and keys"),
        (config.has_sandwich_norms, "norms after attention and perceptron"),
        (config.activation != "silu", f"the activation {config.activation}"),
        (config.embedding_scale != 1.0, "scaled embeddings"),
        (config.local_rope is not None, "two rotary embeddings"),
        # Within the window, windowed and full attention are the same.
        (bool(windows) and context > min(windows), "sliding windows that are shorter than the context"),
    ):
        if has_it:
            return f"they do not compute {what}"
    try:
        _shape(config, block_size).check()
    except ValueError as error:
        return str(error)
    return None


class NativeForward:
    gathered_positions = 0
    reads_unwritten = False

    def __init__(self, weights: DecoderWeights[NativeMatrix], cache: KVCache, context: int, kernels: Library) -> None:
        config = weights.config
        self.kernels = kernels
        self.folds_norms = bool(weights.layers) and weights.layers[0].norms.before_attention is None
        assert weights.embedding is not None and weights.head is not None, "a pipeline stage is not run natively"
        self._block_size = cache.block_size
        self._model = NativeModel(
            _shape(config, cache.block_size),
            [_layer(layer) for layer in weights.layers],
            weights.embedding.to(torch.bfloat16).contiguous(),
            weights.head,
            rotary_table(config.rope, config.head_dim, context),
            cache.pages.unbind(0),
            kernels,
            norm=weights.norm,
        )

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        self._model.set_adapter(slot, None if adapter is None else pack_adapter(adapter))

    def __call__(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        return self._run(inputs, hidden, None)

    def greedy(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor | None:
        tokens = torch.empty(inputs.sampled_rows.shape[0], dtype=torch.int64)
        self._run(inputs, hidden, tokens)
        return tokens

    def _run(self, inputs: Inputs, hidden: Tensor | None, tokens: Tensor | None) -> Tensor:
        # Positions that nobody has written are never read, so no block needs to be cleared first.
        batch = PagedBatch(*inputs.ragged, block_size=self._block_size)
        return self._model.logits(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.sampled_rows,
            batch,
            adapter_slots=None if inputs.row_slots is None else torch.from_numpy(inputs.row_slots),
            hidden_rows=None if hidden is None else inputs.hidden_rows,
            hidden=hidden,
            tokens=tokens,
        )


def _layer(layer: Layer[NativeMatrix]) -> NativeLayer:
    assert isinstance(layer.mlp, Mlp), "a mixture of experts is not run natively"
    norms = layer.norms
    return NativeLayer(
        layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down, norms.before_attention, norms.before_mlp
    )


def _shape(config: ModelConfig, block_size: int) -> NativeShape:
    return NativeShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=block_size,
        epsilon=config.norm_epsilon,
        scale=config.attention_scale,
    )
