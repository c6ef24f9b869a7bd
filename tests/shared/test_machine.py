"""What the machine has."""

from pathlib import Path

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


def test_there_is_a_core() -> None:
    assert num_cores() >= 1
