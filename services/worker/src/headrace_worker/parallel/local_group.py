"""A group whose ranks are all on this machine."""

import secrets
import sys

from headrace_worker.parallel.layout import local_places
from headrace_worker.parallel.leader_sockets import leader_sockets
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.rank_group import RankGroup

LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {
    # Else both look up this machine's name, which need not lead anywhere.
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "NCCL_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


async def start_local_group(
    module: str, tensor_parallel: int, pipeline_parallel: int, hang_timeout_s: float
) -> RankGroup:
    """Nobody outside this machine can reach its ranks."""
    with leader_sockets(LOOPBACK, 0) as sockets:
        store_port, command_port = sockets.ports
        common = RankPlace(
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            host=LOOPBACK,
            leader_host=LOOPBACK,
            store_port=store_port,
            command_port=command_port,
            token=secrets.token_hex(16),
        )
        return await RankGroup.start(module, local_places(common, 0, 1, sockets.fds), hang_timeout_s, LOOPBACK_ONLY)
