"""One rank's connections with the others for tensors: NCCL between GPUs, gloo between CPUs.

There is no process-wide default group: a process may hold several ranks, as tests do.
"""

from collections import deque
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from headrace_shared.errors import ConfigError
from headrace_worker.models.shard import Shard
from headrace_worker.parallel.channel import PeerLost
from headrace_worker.parallel.place import RankPlace

STORE_TIMEOUT = timedelta(hours=1)
"""Ranks wait for each other while they read their weights, and the supervisor's own limit ends that sooner."""
OPERATION_TIMEOUT = timedelta(minutes=10)
"""The supervisor notices a hang long before."""


class Collectives(Protocol):
    """What torch's process groups have in common, which their type stubs do not say."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work: ...


class TorchGroup:
    """Not thread-safe. A lost rank is a PeerLost in whatever the others do next with it."""

    def __init__(self, place: RankPlace, store: Store, device: torch.device) -> None:
        """Returns when all ranks have come so far. Raises PeerLost."""
        self._place = place
        self._store = store
        self.shard = Shard(place.tp_rank, place.tensor_parallel, place.stage, place.pipeline_parallel)
        try:
            self._stage = _connect(store, f"stage-{place.stage}", place.tp_rank, place.tensor_parallel, device)
            # The ranks with the same heads of every stage.
            self._line = _connect(store, f"line-{place.tp_rank}", place.stage, place.pipeline_parallel, device)
        except RuntimeError as error:
            raise PeerLost(f"the ranks do not find each other: {error}") from error
        self._sends: deque[tuple[Work, Tensor]] = deque()

    @classmethod
    def open(cls, place: RankPlace, device: torch.device) -> "TorchGroup":
        """Meets the other ranks at the leader's store. Raises PeerLost."""
        try:
            store = TCPStore(
                place.leader_host,
                place.store_port,
                world_size=place.world_size,
                is_master=place.is_leader,
                timeout=STORE_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=place.store_fd,
            )
        except RuntimeError as error:
            raise PeerLost(f"no store at {place.leader_host}:{place.store_port}: {error}") from error
        return cls(place, store, device)

    def all_reduce(self, values: Tensor) -> Tensor:
        """As in `models.communicator.Communicator`."""
        if self._stage is None or not values.numel():
            return values
        values = values.contiguous()
        try:
            self._stage.allreduce([values]).wait()
        except RuntimeError as error:
            raise PeerLost(f"all-reduce failed: {error}") from error
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """As in `models.communicator.Communicator`."""
        if self._stage is None:
            return values
        num_ranks, (num_rows, width) = self._place.tensor_parallel, values.shape
        gathered = values.new_empty((num_ranks, num_rows, width))
        if values.numel():
            try:
                self._stage.allgather([list(gathered.unbind(0))], [values.contiguous()]).wait()
            except RuntimeError as error:
                raise PeerLost(f"all-gather failed: {error}") from error
        return gathered.transpose(0, 1).reshape(num_rows, num_ranks * width)

    def send(self, hidden: Tensor) -> None:
        """To the next stage. `hidden` must not be changed any more. On a GPU it is only queued; on a CPU it waits for
        the next stage where that is behind by as many iterations as there are stages."""
        assert self._line is not None and not self.shard.is_last, "nobody to send to"
        hidden = hidden.contiguous()
        try:
            work = self._line.send([hidden], self._place.stage + 1, 0)
            if hidden.is_cuda:
                work.wait()  # for the stream, not for us: what is recorded in a graph must not be waited for outside
                return
            self._sends.append((work, hidden))
            while len(self._sends) > self._place.pipeline_parallel:
                self._sends.popleft()[0].wait()
        except RuntimeError as error:
            raise PeerLost(f"stage {self._place.stage + 1} takes nothing any more: {error}") from error

    def receive(self, hidden: Tensor) -> None:
        """Fills `hidden` with what the stage before has sent next."""
        assert self._line is not None and not self.shard.is_first, "nobody to receive from"
        try:
            self._line.recv([hidden], self._place.stage - 1, 0).wait()
        except RuntimeError as error:
            raise PeerLost(f"stage {self._place.stage - 1} sends nothing any more: {error}") from error

    def smallest(self, what: str, value: int) -> int:
        """Of the values of all ranks; each waits for all others."""
        return min(int(theirs) for theirs in self._all(what, str(value)))

    def check_same(self, key: str, what: str, value: str) -> None:
        """Raises ConfigError, naming the setting `key`, unless all ranks have the same; each waits for all others."""
        for rank, theirs in enumerate(self._all(what, value)):
            if theirs != value:
                raise ConfigError(key, f"{what}: {value} on rank {self._place.rank}, but {theirs} on rank {rank}")

    def wait_for_first_here(self, what: str) -> None:
        """On all ranks of a machine but the first: until that one has said `done_here`."""
        self._get(f"{what}/{self._place.rank - self._place.local_rank}")

    def done_here(self, what: str) -> None:
        self._store.set(f"{what}/{self._place.rank}", "done")

    def _all(self, what: str, value: str) -> list[str]:
        self._store.set(f"{what}/{self._place.rank}", value)
        return [self._get(f"{what}/{rank}") for rank in range(self._place.world_size)]

    def _get(self, key: str) -> str:
        try:
            return bytes(self._store.get(key)).decode()
        except RuntimeError as error:
            raise PeerLost(f"the store is gone: {error}") from error


def _connect(store: Store, name: str, rank: int, size: int, device: torch.device) -> Collectives | None:
    """None for a rank on its own."""
    if size == 1:
        return None
    own = PrefixStore(name, store)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in torch's builds for CPUs

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        return cast(Collectives, ProcessGroupNCCL(own, rank, size, options))
    return cast(Collectives, ProcessGroupGloo(own, rank, size, OPERATION_TIMEOUT))
