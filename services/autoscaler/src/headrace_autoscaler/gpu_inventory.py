"""Which GPUs there are and which a new worker gets. Pure."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GPU_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
"""An index, or a UUID as NVIDIA's driver writes it (GPU-… or MIG-…)."""


class Gpu(NamedTuple):
    id: str
    """What the engine is asked for: the UUID where it is known, which no reboot changes; else the index."""
    position: int
    """Its place in the driver's own order."""


class NotEnoughGpus(Exception):
    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"a worker takes {wanted} GPUs together, and {free} of {total} are free")


def listed_gpus(ids: Iterable[str]) -> tuple[Gpu, ...]:
    """An inventory from a user's list. Raises ValueError naming what is no GPU or is there twice."""
    gpus: dict[str, Gpu] = {}
    for position, name in enumerate(ids):
        if GPU_ID.fullmatch(name) is None:
            raise ValueError(f"{name!r} is neither an index nor a UUID of a GPU")
        if name in gpus:
            raise ValueError(f"GPU {name} is listed twice")
        gpus[name] = Gpu(name, int(name) if name.isdigit() else position)
    return tuple(gpus.values())


def named_gpus(inventory: Sequence[Gpu], names: Iterable[str], count: int) -> frozenset[str]:
    """Ids of the GPUs that a device request means: by index or UUID, or by number (from index 0 on), −1 being the
    engine's word for all. Those that are not in the inventory are of no concern."""
    listed = set(names)
    if not listed:
        return frozenset(gpu.id for gpu in inventory if count < 0 or gpu.position < count)
    return frozenset(gpu.id for gpu in inventory if gpu.id in listed or str(gpu.position) in listed)


def assign(inventory: Sequence[Gpu], taken: Iterable[str], count: int) -> tuple[str, ...]:
    """Ids of `count` free GPUs: neighbours where there are, since links between them are the fastest; of several runs
    the shortest that is long enough, so that long ones are left for those who need them. Raises NotEnoughGpus."""
    occupied = set(taken)
    free = sorted((gpu for gpu in inventory if gpu.id not in occupied), key=lambda gpu: gpu.position)
    if len(free) < count:
        raise NotEnoughGpus(count, len(free), len(inventory))
    fitting = [run for run in _runs(free) if len(run) >= count]
    chosen = min(fitting, key=len) if fitting else free
    return tuple(gpu.id for gpu in chosen[:count])


def _runs(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """GPUs of consecutive indices, together."""
    runs: list[list[Gpu]] = []
    for gpu in gpus:
        if runs and gpu.position == runs[-1][-1].position + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs
