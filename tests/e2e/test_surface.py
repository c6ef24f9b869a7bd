"""What a running system shows to others: where it listens, who gets into its broker, and where its keys are."""

import contextlib
from pathlib import Path

import httpx
import psutil
import pytest

from headrace_shared.broker_permissions import Role
from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_bus import NatsBus
from tests.e2e.launcher import Launched
from tests.e2e.listeners import listeners_of

pytestmark = [pytest.mark.e2e, pytest.mark.nats]

TEXTS = (".log", ".json", ".out", ".conf", ".ports", "")


def with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_only_the_router_can_be_reached_from_other_machines(scripted: Launched) -> None:
    listeners = listeners_of(scripted)
    assert {name for (address, _), name in listeners.items() if address != "127.0.0.1"} == {"router"}
    assert {"nats", "scheduler", "worker"} <= set(listeners.values())


async def test_the_broker_on_loopback_is_open_to_no_user_and_no_browser_of_this_machine(scripted: Launched) -> None:
    """Neither without a key, nor over the port that tells about it."""
    with pytest.raises(BusUnavailable, match="refuses our credentials"):
        await NatsBus.connect(scripted.nats_url(), name="anonymous", on_closed=lambda: None)
    ports = [port for (_, port), name in listeners_of(scripted).items() if name == "nats"]
    assert len(ports) == 2
    for port in ports:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            for path in ("/", "/connz", "/varz", "/healthz", "/jsz", "/accountz"):
                with contextlib.suppress(httpx.HTTPError):  # the one that speaks no HTTP
                    assert (await client.get(path)).status_code == 404, path


def test_keys_are_in_their_files_and_nowhere_else(scripted: Launched) -> None:
    seeds = {role: Path(scripted.key_file(role)).read_text().strip() for role in Role}
    for role in Role:
        assert Path(scripted.key_file(role)).stat().st_mode & 0o777 == 0o600
        assert Path(scripted.key_file(role)).parent.stat().st_mode & 0o777 == 0o700
    processes = [process for entry in scripted.ps() for process in with_children(int(entry["pid"]))]
    shown = [f"{process.cmdline()} {process.environ()}" for process in processes]
    shown.append(httpx.get(f"{scripted.url}/metrics").text)
    files = [path for path in scripted.data_dir.rglob("*") if path.is_file() and path.suffix in TEXTS]
    shown += [path.read_text(errors="replace") for path in files]
    assert len(shown) > 10
    for role, seed in seeds.items():
        assert len(seed) == 58
        assert not [text for text in shown if seed in text], role
