"""How much memory there is to use, so that too little is said at the start and not by the kernel's killer."""

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int | None:
    """What this process may still allocate. None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [limit for limit in (_system_available(), _cgroup_available()) if limit is not None]
    return min(limits, default=None)


def _system_available() -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(root / limit_file), _read(root / usage_file)
        if limit is not None and usage is not None and limit.strip().isdigit():
            # Page cache counts as usage but gives way; the weights file itself is most of it while loading.
            return max(0, int(limit) - int(usage) + _cgroup_file_cache(root))
    return None


def _cgroup_file_cache(root: Path) -> int:
    for line in (_read(root / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
