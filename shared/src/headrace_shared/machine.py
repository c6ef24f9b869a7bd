"""What this machine has for us: memory and cores, within our control group."""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NVIDIA = Path("/proc/driver/nvidia/gpus")


def available_memory(cgroup: Path = CGROUP) -> int | None:
    """Bytes that we may still allocate, of the machine or of our control group, whichever is less. None where the
    system does not tell."""
    limits = [limit for limit in (_system_available(), _cgroup_available(cgroup)) if limit is not None]
    return min(limits, default=None)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _cgroup_available(root: Path) -> int | None:
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(root / limit_file), _read(root / usage_file)
        if limit is not None and usage is not None and limit.strip().isdigit():
            # Page cache counts as usage but gives way; a weights file that is being read is most of it.
            return max(0, int(limit) - int(usage) + _file_cache((root / usage_file).with_name("memory.stat")))
    return None


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
