"""The backend of CUDA devices: Triton kernels, and matrix products by cuBLAS, or by kernels where weights are quantized
or results must not depend on the batch."""

from functools import partial

from torch import Tensor

from headrace_worker.attention.triton import TritonAttention
from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.device import Device
from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.cuda.kernel_operations import KernelOperations
from headrace_worker.cuda.kernel_sampler import KernelSampler
from headrace_worker.cuda.packing import InvariantPacking, QuantizedPacking
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.kernels.block_copy import copy_blocks
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder_weights import Packing
from headrace_worker.models.linear import Linear, TorchPacking
from headrace_worker.models.operations import Attend
from headrace_worker.models.shard import Shard
from headrace_worker.models.weight_bytes import WeightBits


class PagedAttention:
    """A `DeviceAttention`."""

    def __init__(self, config: ModelConfig, shard: Shard, cache: KVCache, sizes: Sizes, *, deterministic: bool) -> None:
        self._attention = TritonAttention(
            cache,
            num_heads=len(shard.heads(config)),
            max_sequences=sizes.max_sequences,
            max_tokens=max(sizes.tokens_per_iteration, sizes.max_sequences),
            context=sizes.context,
            scale=config.attention_scale,
            windows=[config.window(layer) for layer in shard.layers(config)],
            batch_invariant=deterministic,
        )

    def prepare(self, batch: DeviceBatch) -> Attend:
        attention = self._attention.plan(
            batch.query_starts,
            batch.context_lengths,
            batch.block_tables,
            num_decodes=batch.num_decodes,
            num_tokens=batch.token_ids.shape[0],
        )

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            self._attention.write(layer, keys_values, batch.kv_slots)
            return attention(layer, queries)

        return attend


def triton_backend(device: Device, *, deterministic: bool, quantization: str = "none", vocab_size: int = 0) -> Backend:
    """`deterministic`: a sequence's tokens do not depend on what else is computed with them; not with `quantization`,
    which is none, int8, int4 or fp8."""
    packing: Packing[Linear] = TorchPacking(folds_norms=False)
    weight_bits: WeightBits | None = None
    if deterministic:
        packing = InvariantPacking()
    elif quantization != "none":
        quantized = QuantizedPacking(quantization, vocab_size)
        packing, weight_bits = quantized, quantized.bits
    return Backend(
        device=device,
        packing=packing,
        operations=lambda config: KernelOperations(config.norm_epsilon),
        sampler=KernelSampler,
        attention=partial(PagedAttention, deterministic=deterministic),
        copy_blocks=copy_blocks,
        weight_bits=weight_bits,
    )
