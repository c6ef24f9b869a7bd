"""What a device computes with: the one place that chooses kernels."""

from collections.abc import Callable
from typing import NamedTuple

from headrace_shared.fleet_messages import ModelCard
from headrace_worker.cuda.decoder_forward import DeviceAttention
from headrace_worker.cuda.device import Device
from headrace_worker.cuda.engine import CopyBlocks
from headrace_worker.cuda.sampler import DeviceSampler
from headrace_worker.cuda.sizing import Sizes
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder_weights import Packing
from headrace_worker.models.linear import Linear
from headrace_worker.models.operations import Operations
from headrace_worker.models.shard import Shard
from headrace_worker.models.weight_bytes import WeightBits


class Backend(NamedTuple):
    device: Device
    packing: Packing[Linear]
    operations: Callable[[ModelConfig], Operations]
    sampler: Callable[[Device, ModelCard, int], DeviceSampler]
    """(device, the model's card, sequences in one iteration)"""
    attention: Callable[[ModelConfig, Shard, KVCache, Sizes], DeviceAttention]
    copy_blocks: CopyBlocks
    weight_bits: WeightBits | None = None
    """What `packing` makes of a matrix. None: it leaves all as they are."""
