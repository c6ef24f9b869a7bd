"""The backend of CUDA devices: Triton kernels, and matrix products by cuBLAS or, where results must not depend on the
batch, by a kernel that sums up every row alike."""

from functools import partial

from torch import Tensor

from headrace_worker.attention.triton import TritonAttention
from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.device import Device
from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.cuda.kernel_operations import KernelOperations
from headrace_worker.cuda.kernel_sampler import KernelSampler
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.kernels.matmul import matmul
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.linear import Linear, TorchPacking
from headrace_worker.models.operations import Attend
from headrace_worker.models.shard import Shard


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


class InvariantPacking:
    """Leaves weights as they are; each output is summed up in the same order whatever the number of rows."""

    folds_norms = False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return partial(matmul, weight=weight, bias=bias)

    def gate_up(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias)


def triton_backend(device: Device, *, deterministic: bool) -> Backend:
    """`deterministic`: a sequence's tokens do not depend on what else is computed with them."""
    return Backend(
        device=device,
        packing=InvariantPacking() if deterministic else TorchPacking(folds_norms=False),
        operations=lambda config: KernelOperations(config.norm_epsilon),
        sampler=KernelSampler,
        attention=partial(PagedAttention, deterministic=deterministic),
    )
