"""What this machine has for us: memory and cores, within our control group and those around it."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
"""In which groups we are: `hierarchy:controllers:path`, one a line; without controllers in the newer kind."""
NVIDIA = Path("/proc/driver/nvidia/gpus")


def available_memory(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int | None:
    """Bytes that we may still allocate, of the machine or of our control groups, whichever is least. None where the
    system does not tell."""
    limits = [limit for limit in (_system_available(), *_cgroup_available(cgroup, own)) if limit is not None]
    return min(limits, default=None)


def num_cores(cgroup: Path = CGROUP, own: Path = OWN_GROUPS) -> int:
    """CPU cores that this process may use: those it may run on, and no more than it gets the time of. A thread beyond
    that would stop all others at the next barrier, until the time of the next period."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _cgroup_cores(cgroup, own))]))


def num_gpus(drivers: Path = NVIDIA) -> int:
    """GPUs that NVIDIA's driver shows. No library is asked: those that could take seconds to load."""
    try:
        return len(list(drivers.iterdir()))
    except OSError:
        return 0


def _system_available() -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_available(root: Path, own: Path) -> Iterator[int]:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in _groups(root, own, "memory"):
            limit, usage = _read(group / limit_file), _read(group / usage_file)
            if limit is not None and usage is not None and limit.strip().isdigit():
                # Page cache counts as usage but gives way; a weights file that is being read is most of it.
                yield max(0, int(limit) - int(usage) + _file_cache(group / "memory.stat"))


def _cgroup_cores(root: Path, own: Path) -> Iterator[float]:
    """Processor time for each time."""
    for group in _groups(root, own, "cpu"):
        both = (_read(group / "cpu.max") or "").split()
        if len(both) != 2:
            both = [(_read(group / f"cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
        if all(number.isdigit() for number in both) and int(both[1]):
            yield int(both[0]) / int(both[1])


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that we are in and of those around them: the limits of all hold. In a container they may
    be shown as if it were in none."""
    yield root
    yield root / controller
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root if not controllers else root / controller
        if controllers and controller not in controllers.split(","):
            continue
        names = path.strip("/").split("/")
        if names != [""] and ".." not in names:
            yield from (top.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))


def _file_cache(path: Path) -> int:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
