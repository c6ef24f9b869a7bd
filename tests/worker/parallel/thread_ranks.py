"""The ranks of a group as threads of one process: real engines, sockets and collectives, without starting processes."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import HashStore, Store

from headrace_worker.config import EngineConfig
from headrace_worker.iteration import Engine, Report
from headrace_worker.models.checkpoint import open_checkpoint
from headrace_worker.parallel.channel import FollowerChannel, LeaderChannel, PeerLost
from headrace_worker.parallel.follower import Follower
from headrace_worker.parallel.layout import local_places
from headrace_worker.parallel.leader import LeaderEngine
from headrace_worker.parallel.leader_sockets import leader_sockets
from headrace_worker.parallel.loading import load_on_device, load_rank
from headrace_worker.parallel.local_group import LOOPBACK_ONLY
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.pulse import Pulse
from headrace_worker.parallel.torch_group import TorchGroup
from tests.worker.cuda.torch_backend import torch_backend

CPU = torch.device("cpu")
LoadRank = Callable[[EngineConfig, TorchGroup, torch.device, Report], Engine]
SIZES = EngineConfig(
    device="cpu",
    dtype="float32",
    num_blocks=64,
    block_size=8,
    max_sequences=64,
    tokens_per_iteration=32,
    num_threads=1,
)


@contextmanager
def rank_threads(
    folder: Path, tensor_parallel: int, pipeline_parallel: int, load: LoadRank = load_rank, **changes: Any
) -> Iterator[LeaderEngine]:
    """The leader's engine. Afterwards every follower has ended, none with an error."""
    os.environ.update(LOOPBACK_ONLY)
    store = HashStore()
    errors: list[BaseException] = []
    with leader_sockets("127.0.0.1", 0) as sockets:
        common = RankPlace(
            tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, command_port=sockets.ports[1]
        )
        places = local_places(common, 0, 1, (sockets.store.fileno(), sockets.command.detach()))
        configs = [replace(SIZES, model=str(folder), place=place, **changes) for place in places]
        threads = [
            threading.Thread(target=_follow, args=(config, store, load, errors), name=f"rank-{config.place.rank}")
            for config in configs[1:]
        ]
        for thread in threads:
            thread.start()
        channel = LeaderChannel.open(places[0], 30.0, lambda problem: None)
        try:
            engine = load(configs[0], TorchGroup(places[0], store, CPU), CPU, lambda what, done, total: None)
            yield LeaderEngine(engine, channel, places[0], Pulse(lambda beat: None))
        finally:
            channel.close()
            for thread in threads:
                thread.join(timeout=30.0)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def load_on_host_device(config: EngineConfig, group: TorchGroup, device: torch.device, report: Report) -> Engine:
    """As for a GPU, on the host's stand-in for one."""
    checkpoint = open_checkpoint(Path(config.model))
    return load_on_device(config, checkpoint, "tiny", group, torch_backend(), torch.float32, report)


def _follow(config: EngineConfig, store: Store, load: LoadRank, errors: list[BaseException]) -> None:
    try:
        channel = FollowerChannel.open(config.place, 30.0, lambda problem: None)
        engine = load(config, TorchGroup(config.place, store, CPU), CPU, lambda what, done, total: None)
        Follower(engine, channel, config.place, Pulse(lambda beat: None)).run()
    except PeerLost:
        pass  # the test is over
    except BaseException as error:
        errors.append(error)
