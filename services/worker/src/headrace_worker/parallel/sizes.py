"""What a rank's part of a model takes. Pure."""

from headrace_worker.models.config import ModelConfig
from headrace_worker.models.shard import Shard
from headrace_worker.parallel.place import RankPlace


def shard_of(rank: int, place: RankPlace) -> Shard:
    """Of any rank of the group that `place` is in."""
    stage, tp_rank = divmod(rank, place.tensor_parallel)
    return Shard(tp_rank, place.tensor_parallel, stage, place.pipeline_parallel)


def kv_bytes_per_token(config: ModelConfig, shard: Shard, element_size: int) -> int:
    return 2 * len(shard.layers(config)) * len(shard.kv_heads(config)) * config.head_dim * element_size


def group_kv_bytes_per_token(config: ModelConfig, place: RankPlace, element_size: int) -> int:
    """Of all ranks together. More than one rank alone would take where key-value heads are repeated."""
    return sum(kv_bytes_per_token(config, shard_of(rank, place), element_size) for rank in range(place.world_size))


def weight_bytes(config: ModelConfig, shard: Shard, element_size: int) -> int:
    """About, and rather more: what all ranks of a stage hold alike, such as norms and routers, is small."""
    table = config.vocab_size * config.hidden_size
    layers = config.num_parameters - (1 if config.ties_embeddings else 2) * table
    tables = (shard.is_first + shard.is_last) * table
    own = layers * len(shard.layers(config)) / config.num_layers + tables
    return int(own / shard.tp_size) * element_size
