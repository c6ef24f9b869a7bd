"""Which part of a group of ranks a process is. Values only: the supervisor decides them, each rank reads them."""

from msgspec import Struct


class RankPlace(Struct, frozen=True, kw_only=True):
    """One rank's place. Ranks of one stage are neighbours: rank = stage * tensor_parallel + index in the stage."""

    rank: int = 0
    tensor_parallel: int = 1
    """Ranks that share each layer."""
    pipeline_parallel: int = 1
    """Stages that the layers are dealt out to."""
    local_rank: int = 0
    """Among the ranks of this machine."""
    num_local_ranks: int = 1
    host: str = "127.0.0.1"
    """Where ranks of other machines reach this one."""
    leader_host: str = "127.0.0.1"
    """Where rank 0 is reached, which keeps the torch.distributed store."""
    store_port: int = 0
    command_port: int = 0
    store_fd: int | None = None
    """Rank 0 only: the listening socket of that port, bound by the supervisor, who could then tell the others."""
    command_fd: int | None = None
    token: str = ""
    """Secret of this start of the group: keeps ranks of another one out."""

    @property
    def world_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel

    @property
    def is_leader(self) -> bool:
        """Takes the commands, runs the iteration loop, and tells the others what to do."""
        return self.rank == 0

    @property
    def sampler(self) -> int:
        """The rank that samples: the first one of the last stage."""
        return (self.pipeline_parallel - 1) * self.tensor_parallel

    @property
    def is_sampler(self) -> bool:
        return self.rank == self.sampler
