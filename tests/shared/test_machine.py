"""What the machine has."""

import os
from pathlib import Path

import pytest

from headrace_shared.machine import available_memory, num_cores


def test_the_control_group_limits_memory(tmp_path: Path) -> None:
    everything = available_memory(tmp_path)
    assert everything is not None and everything > 4_000_000
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    assert available_memory(tmp_path) == 3_000_000
    (tmp_path / "memory.current").write_text("6000000\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    unlimited = available_memory(tmp_path)
    assert unlimited is not None and unlimited > 4_000_000


def test_page_cache_gives_way(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4500000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 4000000\n")
    assert available_memory(tmp_path) == 4_500_000


def test_the_older_control_groups_count_too(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("5000000\n")
    (folder / "memory.usage_in_bytes").write_text("4500000\n")
    (folder / "memory.stat").write_text("total_inactive_file 1000000\n")
    assert available_memory(tmp_path) == 1_500_000


def test_the_limits_of_all_groups_around_us_hold(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/outer/inner\n1:name=systemd:/elsewhere\n0::/slice/unit\n")
    for folder, limit in (("memory/outer", 6_000_000), ("memory/outer/inner", 9_000_000), ("slice", 5_000_000)):
        (tmp_path / folder).mkdir(parents=True)
        name = "limit_in_bytes" if folder.startswith("memory") else "max"
        (tmp_path / folder / f"memory.{name}").write_text(f"{limit}\n")
        usage = "usage_in_bytes" if folder.startswith("memory") else "current"
        (tmp_path / folder / f"memory.{usage}").write_text("1000000\n")
    assert available_memory(tmp_path, own) == 4_000_000
    (tmp_path / "slice" / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, own) == 5_000_000


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="fewer would be no limit")
@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "190000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"slice/cpu.max": "max 100000\n", "slice/unit/cpu.max": "100000 100000\n"}, 1),
        ({"slice/cpu.max": "100000 100000\n", "slice/unit/cpu.max": "max 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/pod/cpu.cfs_quota_us": "100000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu.max": "100000 0\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
    ],
)
def test_processor_time_that_is_limited_counts_as_fewer_cores(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    own = tmp_path / "own"
    own.write_text("2:cpu,cpuacct:/pod\n0::/slice/unit\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert num_cores(tmp_path, own) == (limit or len(os.sched_getaffinity(0)))


def test_there_is_a_core() -> None:
    assert num_cores() >= 1
