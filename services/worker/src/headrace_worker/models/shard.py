"""Which part of a model one rank holds. Values only: the ranks' processes and their messages are elsewhere."""

from typing import NamedTuple

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import ModelConfig


class Shard(NamedTuple):
    """Rank `tp_rank` of `tp_size` tensor-parallel ones (Shoeybi et al., 2019) in stage `pp_rank` of `pp_size`."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def is_first(self) -> bool:
        """Of the pipeline: it turns token ids into hidden states."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Of the pipeline: it turns hidden states into logits."""
        return self.pp_rank == self.pp_size - 1

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError if the model cannot be divided so."""
        for key, rank, size in (
            ("tensor_parallel", self.tp_rank, self.tp_size),
            ("pipeline_parallel", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(key, f"rank {rank} of {size}")
        if config.num_kv_heads < self.tp_size:
            if config.num_heads % self.tp_size:
                raise ConfigError("tensor_parallel", f"{config.num_heads} heads cannot be divided by {self.tp_size}")
            if self.tp_size % config.num_kv_heads:
                raise ConfigError(
                    "tensor_parallel",
                    f"{config.num_kv_heads} key-value heads cannot be repeated equally often for {self.tp_size} ranks",
                )
        if config.intermediate_size % self.tp_size:
            raise ConfigError(
                "tensor_parallel", f"an inner size of {config.intermediate_size} cannot be divided by {self.tp_size}"
            )
        if config.vocab_size < self.tp_size:
            raise ConfigError("tensor_parallel", f"{self.tp_size} ranks for {config.vocab_size} tokens")
        if config.num_layers < self.pp_size:
            raise ConfigError("pipeline_parallel", f"{config.num_layers} layers do not make {self.pp_size} stages")

    def layers(self, config: ModelConfig) -> range:
        """Of this stage. Where they cannot be equal, earlier stages have one more: the last one computes the head."""
        each, more = divmod(config.num_layers, self.pp_size)
        start = self.pp_rank * each + min(self.pp_rank, more)
        return range(start, start + each + (self.pp_rank < more))

    def heads(self, config: ModelConfig) -> range:
        """All that share a key-value head are on one rank, unless there are fewer of those than ranks."""
        if config.num_kv_heads < self.tp_size:
            return self._part(config.num_heads)
        kv_heads, num_sharing = self.kv_heads(config), config.num_heads // config.num_kv_heads
        return range(kv_heads.start * num_sharing, kv_heads.stop * num_sharing)

    def kv_heads(self, config: ModelConfig) -> range:
        """Where they cannot be equally many, earlier ranks have one more. With fewer of them than ranks, several ranks
        hold the same one."""
        if config.num_kv_heads >= self.tp_size:
            each, more = divmod(config.num_kv_heads, self.tp_size)
            start = self.tp_rank * each + min(self.tp_rank, more)
            return range(start, start + each + (self.tp_rank < more))
        head = self.tp_rank * config.num_kv_heads // self.tp_size
        return range(head, head + 1)

    def inner(self, config: ModelConfig) -> range:
        """Of the multilayer perceptron, or of each expert."""
        return self._part(config.intermediate_size)

    def vocabulary(self, config: ModelConfig) -> range:
        """Equally long for every rank, so the last ones may reach beyond the vocabulary."""
        size = -(-config.vocab_size // self.tp_size)
        return range(self.tp_rank * size, (self.tp_rank + 1) * size)

    def _part(self, total: int) -> range:
        size = total // self.tp_size
        return range(self.tp_rank * size, (self.tp_rank + 1) * size)


WHOLE = Shard()
"""One rank that holds everything."""
