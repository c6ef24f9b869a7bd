"""Weights, cache and engine of a device: loads, measures, rehearses and records."""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_worker.adapters.store import AdapterStore
from headrace_worker.adapters.weights import AdapterReader, adapter_bytes
from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.decoder_forward import DecoderForward, DeviceAttention
from headrace_worker.cuda.engine import CudaEngine
from headrace_worker.cuda.forward import DeviceForward
from headrace_worker.cuda.rehearsal import rehearse
from headrace_worker.cuda.sizing import Sizes, batch_sizes, blocks_that_fit
from headrace_worker.iteration import Report
from headrace_worker.kv_cache import KVCache
from headrace_worker.memory import mib
from headrace_worker.models.communicator import Communicator, SingleRank
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.decoder import Decoder
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.shard import WHOLE, Shard
from headrace_worker.models.weight_bytes import WeightBits, matrices, packed_bytes
from headrace_worker.models.weights import TensorSource
from headrace_worker.pooling import Pooling, last_norm

_log = logging.getLogger(__name__)


def build_engine(
    config: ModelConfig,
    source: TensorSource,
    backend: Backend,
    sizes: Sizes,
    make_card: Callable[[int], ModelCard],
    *,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    communicator: Communicator | None = None,
    forward_of: Callable[[Decoder, DeviceAttention], DeviceForward] = DecoderForward,
    agree: Callable[[int], int] = int,
    report: Report,
) -> CudaEngine:
    """`make_card` is told the context. With several ranks, `forward_of` is what a rank does with its part of the model,
    and `agree` makes one number of blocks of that of each. Raises ConfigError where the model and one sequence do not
    fit the device."""
    device = backend.device
    _check_weights(config, shard, dtype, sizes, backend)
    _tell_unpacked(config, dtype, backend.weight_bits)
    weights = read_decoder(
        config,
        source,
        backend.packing,
        shard=shard,
        dtype=dtype,
        device=device.torch_device,
        report=lambda done, total: report("loading weights", done, total),
    )
    decoder = Decoder(
        weights,
        backend.operations(config),
        communicator or SingleRank(),
        context=sizes.context,
        device=device.torch_device,
    )
    report("reading the tokenizer", 0, 1)
    card = make_card(sizes.context)
    report("reading the tokenizer", 1, 1)
    norm = None if weights.norm is not None or not shard.is_last else last_norm(config, source)
    loaded = _Loaded(
        config=config,
        shard=shard,
        dtype=dtype,
        backend=backend,
        sizes=sizes,
        card=card,
        forward_of=partial(forward_of, decoder),
        pooling=Pooling(
            config.hidden_size, None if norm is None else norm.to(device.torch_device), device.torch_device
        ),
        reader=_adapter_reader(config, source, backend, sizes, dtype) if communicator is None else None,
    )
    recorded = batch_sizes(sizes.max_sequences)
    num_blocks = agree(sizes.num_blocks or loaded.num_blocks_that_fit(len(recorded), report))
    engine = loaded.engine(num_blocks, min(sizes.context, num_blocks * sizes.block_size))
    if sizes.num_blocks and device.compiles:
        rehearse(engine)
    engine.record(recorded, lambda done, total: report("recording batch sizes", done, total))
    return engine


class _Loaded(NamedTuple):
    """What the engine that is measured and the one that serves have in common."""

    config: ModelConfig
    shard: Shard
    dtype: torch.dtype
    backend: Backend
    sizes: Sizes
    card: ModelCard
    forward_of: Callable[[DeviceAttention], DeviceForward]
    pooling: Pooling
    reader: AdapterReader | None

    def engine(self, num_blocks: int, context: int) -> CudaEngine:
        config, shard, sizes, device = self.config, self.shard, self.sizes, self.backend.device
        cache = KVCache.of_model(
            config,
            num_blocks=num_blocks,
            block_size=sizes.block_size,
            dtype=self.dtype,
            device=device.torch_device,
            shard=shard,
        )
        built = CudaEngine(
            self.forward_of(self.backend.attention(config, shard, cache, sizes)),
            cache,
            self.card,
            sampler=self.backend.sampler(device, self.card, sizes.max_sequences),
            copy_blocks=self.backend.copy_blocks,
            device=device,
            context=context,
            max_sequences=sizes.max_sequences,
            tokens_per_iteration=sizes.tokens_per_iteration,
            dtype=self.dtype,
            samples=shard.is_last,
            pooling=self.pooling,
        )
        if self.reader is not None:
            built.adapters = AdapterStore(self.reader, built.set_adapter, sizes.max_loras)
        return built

    def num_blocks_that_fit(self, num_records: int, report: Report) -> int:
        """Raises ConfigError for none."""
        config, sizes, device = self.config, self.sizes, self.backend.device
        report("measuring memory", 0, 1)
        # With the engine's own tables and buffers, which the final one will have as well.
        peak_bytes = device.peak_bytes(lambda: rehearse(self.engine(1, sizes.context)))
        memory = device.memory()
        heads = len(self.shard.layers(config)) * len(self.shard.kv_heads(config))
        num_blocks = blocks_that_fit(
            memory,
            share=sizes.memory_share,
            peak_bytes=peak_bytes,
            num_records=num_records,
            kept_bytes=sizes.max_loras * adapter_bytes(config, sizes.max_lora_rank, self.dtype.itemsize),
            block_bytes=2 * heads * sizes.block_size * config.head_dim * self.dtype.itemsize,
        )
        if num_blocks < 1:
            raise ConfigError(
                "gpu_memory_share",
                f"{sizes.memory_share} of {mib(memory.total)} leaves no KV cache beside the weights and iterations of "
                f"{sizes.tokens_per_iteration} tokens ({mib(memory.own)} in use, {mib(peak_bytes)} an iteration)",
            )
        report("measuring memory", 1, 1)
        return num_blocks


def _adapter_reader(
    config: ModelConfig, source: TensorSource, backend: Backend, sizes: Sizes, dtype: torch.dtype
) -> AdapterReader | None:
    if not sizes.max_loras:
        return None
    return AdapterReader(
        config,
        source,
        folds_norms=backend.packing.folds_norms,
        max_rank=sizes.max_lora_rank,
        dtype=dtype,
        device=backend.device.torch_device,
    )


def _check_weights(config: ModelConfig, shard: Shard, dtype: torch.dtype, sizes: Sizes, backend: Backend) -> None:
    whole = config.num_parameters * dtype.itemsize
    if backend.weight_bits is not None:
        whole = packed_bytes(config, dtype.itemsize, backend.weight_bits)
    needed = whole // (shard.tp_size * shard.pp_size)
    memory = backend.device.memory()
    allowed = min(memory.free, int(memory.total * sizes.memory_share) - memory.own)
    if needed > allowed:
        raise ConfigError("model", f"needs {mib(needed)} for its weights, but only {mib(allowed)} are available")


def _tell_unpacked(config: ModelConfig, dtype: torch.dtype, bits: WeightBits | None) -> None:
    """Matrices that are left as they are make a model larger and slower than its user may expect."""
    if bits is None:
        return
    packed = matrices(config)
    left = [matrix for matrix in packed if bits(matrix.num_outputs, matrix.num_inputs) is None]
    if left:
        _log.warning(
            "%d of %d matrices are not quantized but stay in %s: no kernel for %s inputs",
            sum(matrix.number for matrix in left),
            sum(matrix.number for matrix in packed),
            str(dtype).removeprefix("torch."),
            " or ".join(map(str, sorted({matrix.num_inputs for matrix in left}))),
        )
