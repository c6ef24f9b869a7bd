"""How long an iteration takes on GPUs that are not there, by the roofline model (Williams, Waterman, Patterson, 2009).

Work is bound by arithmetic or by memory, whichever takes longer:

    time = overhead + max(operations / (peak * COMPUTE_EFFICIENCY), bytes / (bandwidth * MEMORY_EFFICIENCY))

An iteration reads all weights once and each sequence's keys and values, and computes two operations for each weight and
token, and attention. A batch of prompts is thus bound by arithmetic, decoding by memory, and a mixed batch by either.

The efficiencies are what good engines reach: in prefill about 60 % of a GPU's peak, in decoding about 75 % of its
bandwidth. Several GPUs of one worker share the weights and the cache evenly; exchanging activations costs them
GROUP_EFFICIENCY. These three are assumptions, not measurements, and so is the fixed overhead of an iteration.
"""

from collections.abc import Iterable
from typing import NamedTuple

from headrace_shared.errors import ConfigError
from headrace_worker.timing.hardware import Gpu
from headrace_worker.timing.shapes import ModelShape

COMPUTE_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.75
GROUP_EFFICIENCY = 0.85
OVERHEAD_S = 0.5e-3
"""Of one iteration: launching, sampling and whatever else is not hidden."""
WORKSPACE_SHARE = 0.04
"""Of a GPU's memory: activations, recorded graphs, the libraries' own."""


class Work(NamedTuple):
    """Of one iteration."""

    num_tokens: int
    """Computed."""
    num_pairs: float
    """Queries times the keys that each of them looks at."""
    num_read: int
    """Positions of the cache that are read."""


def work_of(parts: Iterable[tuple[int, int]]) -> Work:
    """Of an iteration over sequences, each given as (start, num_tokens): it computes so many positions from there."""
    num_tokens = num_read = 0
    num_pairs = 0.0
    for start, count in parts:
        num_tokens += count
        num_read += start + count
        num_pairs += count * (start + (count + 1) / 2)
    return Work(num_tokens, num_pairs, num_read)


class Roofline(NamedTuple):
    """One worker: a model on `num_gpus` equal GPUs."""

    gpu: Gpu
    shape: ModelShape
    num_gpus: int = 1
    bits_per_weight: int = 16
    slowdown: float = 1.0
    """All takes so many times as long."""

    @property
    def weight_bytes(self) -> int:
        return self.shape.num_parameters * self.bits_per_weight // 8

    @property
    def flops(self) -> float:
        """That the worker reaches. Weights of 8 bits or less are multiplied in 8 bits, at twice the speed."""
        speed = 2 if self.bits_per_weight <= 8 else 1
        return self.gpu.flops * speed * COMPUTE_EFFICIENCY * self._num_effective

    @property
    def bandwidth(self) -> float:
        """That the worker reaches, in bytes a second."""
        return self.gpu.bandwidth * MEMORY_EFFICIENCY * self._num_effective

    def iteration_s(self, work: Work) -> float:
        shape = self.shape
        operations = 2 * shape.num_parameters * work.num_tokens + shape.attention_flops_per_pair * work.num_pairs
        num_bytes = self.weight_bytes + work.num_read * shape.kv_bytes_per_token()
        return self.slowdown * (OVERHEAD_S + max(operations / self.flops, num_bytes / self.bandwidth))

    def num_blocks(self, block_size: int, memory_share: float) -> int:
        """Blocks of the KV cache in what the weights leave of the share of the memory. Raises ConfigError if they leave
        less than one block."""
        memory = self.gpu.memory * self.num_gpus * (memory_share - WORKSPACE_SHARE)
        num_blocks = int((memory - self.weight_bytes) // (self.shape.kv_bytes_per_token() * block_size))
        if num_blocks < 1:
            needed = self.weight_bytes / self.num_gpus / 1e9
            raise ConfigError(
                "gpu_model",
                f"{self.shape.name} needs {needed:.0f} GB for weights on each of {self.num_gpus} {self.gpu.name} of "
                f"{self.gpu.memory / 1e9:.0f} GB",
            )
        return num_blocks

    @property
    def _num_effective(self) -> float:
        return self.num_gpus * (GROUP_EFFICIENCY if self.num_gpus > 1 else 1.0)
