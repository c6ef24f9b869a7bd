"""A backend of torch alone, on the host: what the engine around the kernels does can be checked without them."""

import torch
from torch import Tensor

from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.device import HostDevice
from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.cuda.sizing import DeviceMemory, Sizes
from headrace_worker.kernels.attention_reference import copy_blocks
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.operations import Attend
from headrace_worker.models.shard import Shard
from headrace_worker.models.torch_operations import TorchOperations
from tests.worker.cuda.torch_sampler import TorchSampler


class TorchPagedAttention:
    """A `DeviceAttention` that gathers every sequence's whole table for every query: right and slow."""

    def __init__(self, config: ModelConfig, shard: Shard, cache: KVCache, sizes: Sizes) -> None:
        self._cache = cache
        self._scale = config.attention_scale
        self._windows = [config.window(layer) for layer in shard.layers(config)]

    def prepare(self, batch: DeviceBatch) -> Attend:
        cache = self._cache
        rows = torch.arange(batch.token_ids.shape[0])
        owners = torch.searchsorted(batch.query_starts[1:].long(), rows, right=True)
        tables = batch.block_tables.long()
        blocks, offsets = batch.kv_slots // cache.block_size, batch.kv_slots % cache.block_size
        places = torch.arange(tables.shape[1] * cache.block_size)[None, :]

        def attend(layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            pages = cache.pages[layer]
            new = keys_values.reshape(-1, 2, cache.num_kv_heads, cache.head_dim)
            for part in (0, 1):
                pages[blocks, part, :, offsets] = new[:, part]
            # [S, 2, heads, positions, head_dim], then by row.
            known = pages[tables].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[owners].float()
            visible = places <= batch.positions[:, None]
            window = self._windows[layer]
            if window is not None:
                visible &= places > batch.positions[:, None] - window
            known = torch.where(visible[:, None, None, :, None], known, 0.0)
            group = queries.shape[1] // cache.num_kv_heads
            keys, values = known.repeat_interleave(group, dim=2).unbind(1)
            scores = (keys @ queries.float().unsqueeze(-1)).squeeze(-1) * self._scale
            weights = scores.masked_fill(~visible[:, None, :], -torch.inf).softmax(-1)
            return (weights.unsqueeze(-2) @ values).flatten(1).to(queries.dtype)

        return attend


def torch_backend(memory: DeviceMemory | None = None, peak_bytes: int = 0) -> Backend:
    return Backend(
        device=HostDevice(memory, peak_bytes),
        packing=TorchPacking(folds_norms=False),
        operations=lambda config: TorchOperations(config.norm_epsilon, torch.device("cpu")),
        sampler=lambda device, card, max_sequences: TorchSampler(device, card.vocab_size),
        attention=TorchPagedAttention,
        copy_blocks=copy_blocks,
    )
