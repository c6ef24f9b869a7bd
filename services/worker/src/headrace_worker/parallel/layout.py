"""Deals the ranks of a group out to machines. Pure."""

from msgspec.structs import replace

from headrace_shared.errors import ConfigError
from headrace_worker.parallel.place import RankPlace


def check_nodes(num_ranks: int, num_nodes: int, node_rank: int, group: str) -> None:
    """Raises ConfigError."""
    if num_nodes == 1:
        return
    if not group:
        raise ConfigError("group", f"needs a name, under which the {num_nodes} nodes find each other")
    if node_rank >= num_nodes:
        raise ConfigError("node_rank", f"must be below {num_nodes}, the number of nodes")
    if num_ranks % num_nodes:
        raise ConfigError("num_nodes", f"{num_ranks} ranks cannot be dealt out to {num_nodes} nodes evenly")


def local_places(
    common: RankPlace, node_rank: int, num_nodes: int, leader_fds: tuple[int, int] | None
) -> list[RankPlace]:
    """The places of one machine's ranks, in order. `common` is what they share; `leader_fds`: the listening sockets of
    the store and of the commands, if rank 0 is here."""
    num_local_ranks = common.world_size // num_nodes
    places = []
    for local_rank in range(num_local_ranks):
        rank = node_rank * num_local_ranks + local_rank
        store_fd, command_fd = leader_fds if leader_fds is not None and rank == 0 else (None, None)
        places.append(
            replace(
                common,
                rank=rank,
                local_rank=local_rank,
                num_local_ranks=num_local_ranks,
                store_fd=store_fd,
                command_fd=command_fd,
            )
        )
    return places
