"""Ranks as threads: the sharded model without processes, to check what each rank reads and computes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from headrace_worker.forward import TorchForward
from headrace_worker.inputs import Inputs, build_inputs
from headrace_worker.iteration import SequenceSlice
from headrace_worker.kv_cache import KVCache
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.models.decoder_weights import DecoderWeights
from headrace_worker.models.linear import Linear, TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.shard import Shard

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 16, 8, 128


class Stage:
    """What the ranks of one pipeline stage share."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadCommunicator:
    def __init__(self, stage: Stage, rank: int) -> None:
        self._stage = stage
        self._rank = rank

    def all_reduce(self, values: Tensor) -> Tensor:
        return self._exchange(values, lambda parts: torch.stack(parts).sum(dim=0))

    def all_gather(self, values: Tensor) -> Tensor:
        return self._exchange(values, lambda parts: torch.cat(parts, dim=-1))

    def _exchange(self, values: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._stage.parts[self._rank] = values
        self._stage.barrier.wait()
        combined = combine(self._stage.parts)
        self._stage.barrier.wait()
        return combined


class Rank:
    def __init__(self, folder: Path, shard: Shard, stage: Stage, *, folds_norms: bool) -> None:
        checkpoint = open_checkpoint(folder)
        config = checkpoint.config
        self.weights: DecoderWeights[Linear] = read_decoder(
            config,
            checkpoint.source,
            TorchPacking(folds_norms=folds_norms),
            shard=shard,
            dtype=torch.float32,
            device=CPU,
            report=lambda done, total: None,
        )
        self.cache = KVCache.of_model(
            config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU, shard=shard
        )
        self.forward = TorchForward(self.weights, ThreadCommunicator(stage, shard.tp_rank), self.cache, CONTEXT)

    def inputs(self, slices: list[SequenceSlice]) -> Inputs:
        return build_inputs(
            slices,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.cache.num_kv_heads,
            null_block=self.cache.null_block,
            gathered_positions=self.forward.gathered_positions,
            device=CPU,
        )


class Ranks:
    """tp_size × pp_size ranks of one model."""

    def __init__(self, folder: Path, tp_size: int, pp_size: int, *, folds_norms: bool = True) -> None:
        self.stages: list[list[Rank]] = []
        for pp_rank in range(pp_size):
            shared = Stage(tp_size)
            shards = [Shard(tp_rank, tp_size, pp_rank, pp_size) for tp_rank in range(tp_size)]
            self.stages.append([Rank(folder, shard, shared, folds_norms=folds_norms) for shard in shards])

    def logits(self, slices: list[SequenceSlice]) -> Tensor:
        """[slices, vocab_size], of which every rank of the last stage must have the same."""
        results: list[Tensor | None] = [None] * len(self.stages[0])
        for stage in self.stages:
            with ThreadPoolExecutor(len(stage)) as pool, torch.inference_mode():
                handed = [None if hidden is None else hidden.clone() for hidden in results]
                results = list(pool.map(lambda rank, hidden: _run(rank, slices, hidden), stage, handed))
        first, *others = [result for result in results if result is not None]
        assert all(torch.equal(first, other) for other in others)
        return first


def _run(rank: Rank, slices: list[SequenceSlice], hidden: Tensor | None) -> Tensor:
    with torch.inference_mode():
        return rank.forward.stage(rank.inputs(slices), hidden)
