import socket
from pathlib import Path

import pytest

from headrace_cli.errors import CommandError
from headrace_cli.preflight import (
    check_data_dir,
    check_memory,
    check_ports,
    needed_memory,
    show_bytes,
)
from tests.cli.instance import free_port


def test_a_free_port_is_fine() -> None:
    check_ports("127.0.0.1", [free_port()])


def test_the_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"^port {port} is taken; choose another with --port$"):
            check_ports("127.0.0.1", [free_port(), port])


def test_ports_beyond_the_last_are_named() -> None:
    with pytest.raises(CommandError, match=r"^there is no port 65536 .*--port$"):
        check_ports("127.0.0.1", range(65536, 65537))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(CommandError, match=rf"^cannot listen at {host}.*--host"):
        check_ports(host, [free_port()])


def test_the_data_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check_data_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_told_with_figures(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"^only .* free at .*, 1048576\.0 GiB are needed; free some or choose "):
        check_data_dir(tmp_path, min_bytes=1 << 50)


@pytest.mark.parametrize("path", ["/proc/nothing", "/dev/null/x", "/dev/null"])
def test_an_unusable_data_folder_is_told(path: str) -> None:
    with pytest.raises(CommandError, match=f"^cannot write to {path}: .*; choose another place with --data-dir$"):
        check_data_dir(Path(path))


def test_memory_grows_with_the_workers() -> None:
    one, two = (needed_memory(workers, 4, 1 << 30) for workers in (1, 2))
    assert two - one > 1 << 30
    check_memory(one, one)
    with pytest.raises(
        CommandError, match=r"of memory available, about .* are needed; use fewer --workers or a smaller"
    ):
        check_memory(two, one)


def test_sizes_are_readable() -> None:
    assert [show_bytes(value) for value in (0, 5 << 20, 3 << 29)] == ["0 MiB", "5 MiB", "1.5 GiB"]
