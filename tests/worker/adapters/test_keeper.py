"""The I/O process keeps the adapters of its engine as the records in the broker want them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from headrace_shared.adapter_records import find_adapter, remove_adapter, store_adapter
from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import AdapterRecord, LoadedAdapter
from headrace_shared.memory_bus import MemoryBroker, MemoryBus
from headrace_shared.subjects import ADAPTERS
from headrace_worker.adapters import keeper as keeper_module
from headrace_worker.adapters.keeper import AdapterKeeper
from headrace_worker.adapters.wanted import parse_given, path_below
from headrace_worker.engine_frames import AdapterLoaded, DropAdapter, LoadAdapter
from headrace_worker.settings import WorkerSettings
from tests.scheduler.shell_builders import until


class Engine:
    """Loads whatever is asked for; an adapter's digest is the name of its folder, unless that is bad."""

    def __init__(self) -> None:
        self.keeper: AdapterKeeper | None = None
        self.loaded: list[str] = []
        self.dropped: list[str] = []
        self.is_passing_problem = False
        self.is_silent = False
        self.unanswered: list[AdapterLoaded] = []

    def send(self, frame: Struct) -> None:
        if isinstance(frame, DropAdapter):
            self.dropped.append(frame.digest)
        elif isinstance(frame, LoadAdapter):
            digest = Path(frame.folder).name
            self.loaded.append(digest)
            problem = "it is bad" if "bad" in digest else ""
            if not problem and frame.digest not in ("", digest):
                problem = "not those"
            if self.is_passing_problem:
                problem = "no room"
            answer = AdapterLoaded(
                name=frame.name, digest="" if problem else digest, problem=problem, number=frame.number
            )
            assert self.keeper is not None
            if self.is_silent:
                self.unanswered.append(answer)
                return
            asyncio.get_running_loop().call_soon(self.keeper.on_loaded, answer)


class Site:
    def __init__(self, bus: MemoryBus, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self.engine = Engine()
        self.num_changes = 0

    def make(self, **settings: Any) -> AdapterKeeper:
        made = AdapterKeeper(
            self.bus,
            WorkerSettings(**({"lora_dir": str(self.folder)} | settings)),
            self.engine.send,
            self._on_change,
        )
        self.engine.keeper = made
        return made

    def _on_change(self) -> None:
        self.num_changes += 1


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    for name in ("first", "second", "bad"):
        (tmp_path / name).mkdir()
    bus = MemoryBus(MemoryBroker())
    await bus.ensure_bucket(ADAPTERS)
    yield Site(bus, tmp_path)
    await bus.close()


def record(name: str, path: str, digest: str = "", model: str = "m") -> AdapterRecord:
    return AdapterRecord(name=name, model=model, path=path, digest=digest)


@contextlib.asynccontextmanager
async def following(keeper: AdapterKeeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_states(keeper: AdapterKeeper, *wanted: tuple[str, str, bool]) -> None:
    """(name, digest, is served)"""
    await until(lambda: [(one.name, one.digest, not one.problem) for one in keeper.states] == list(wanted))


async def test_a_worker_loads_what_is_on_record_before_it_is_ready(site: Site) -> None:
    await store_adapter(site.bus, record("a", "first", "first"), None)
    await store_adapter(site.bus, record("b", "second", "other content"), None)
    await store_adapter(site.bus, record("c", "../first"), None)
    await store_adapter(site.bus, record("d", "first", model="other"), None)
    keeper = site.make()
    await keeper.start("m")
    by_name = {state.name: state for state in keeper.states}
    assert by_name["a"] == LoadedAdapter("a", "first", "", 1)
    assert by_name["b"].problem == "not those" and not by_name["b"].digest
    assert "path" in by_name["c"].problem
    assert set(by_name) == {"a", "b", "c"} and site.engine.loaded == ["first", "second"]


async def test_records_are_followed_and_nothing_is_loaded_twice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "DROP_AFTER_S", 0.05)
    keeper = site.make()
    await keeper.start("m")
    async with following(keeper):
        stored = await store_adapter(site.bus, record("a", "first"), None)
        await until_states(keeper, ("a", "first", True))
        stored = await store_adapter(site.bus, record("a", "first", "first"), stored)
        await until(lambda: keeper.states[0].revision == stored.revision)
        assert site.engine.loaded == ["first"] and site.num_changes == 2
        await store_adapter(site.bus, record("b", "bad"), None)
        await until_states(keeper, ("a", "first", True), ("b", "", False))
        await remove_adapter(site.bus, stored)
        await until_states(keeper, ("b", "", False))
        assert site.engine.dropped == []
        await until(lambda: bool(site.engine.dropped))
        assert site.engine.dropped == ["first"]


async def test_what_is_wanted_again_within_the_grace_is_not_dropped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "DROP_AFTER_S", 0.2)
    keeper = site.make()
    await keeper.start("m")
    async with following(keeper):
        stored = await store_adapter(site.bus, record("a", "first", "first"), None)
        await until_states(keeper, ("a", "first", True))
        await remove_adapter(site.bus, stored)
        await until_states(keeper)
        await store_adapter(site.bus, record("z", "first", "first"), None)
        await until_states(keeper, ("z", "first", True))
        await asyncio.sleep(0.5)
        assert site.engine.dropped == []


async def test_what_could_not_be_loaded_is_tried_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(keeper_module, "MAX_RETRY_S", 0.05)
    await store_adapter(site.bus, record("a", "first", "first"), None)
    missing = await store_adapter(site.bus, record("b", "later", "later"), None)
    site.engine.is_passing_problem = True
    keeper = site.make()
    await keeper.start("m")
    async with following(keeper):
        await until(lambda: site.engine.loaded.count("first") > 3)
        assert [bool(state.problem) for state in keeper.states] == [True, True]
        site.engine.is_passing_problem = False
        await until_states(keeper, ("a", "first", True), ("b", "", False))
        (site.folder / "later").mkdir()
        await until_states(keeper, ("a", "first", True), ("b", "later", True))
        loaded = list(site.engine.loaded)
        await asyncio.sleep(0.2)
        assert site.engine.loaded == loaded, "what is loaded is not loaded again"
        site.engine.is_passing_problem = True
        bad = await store_adapter(site.bus, record("c", "bad"), None)
        await until(lambda: len(keeper.states) == 3)
        await remove_adapter(site.bus, missing)
        await remove_adapter(site.bus, bad)
        await until_states(keeper, ("a", "first", True))
        loaded = list(site.engine.loaded)
        await asyncio.sleep(0.2)
        assert site.engine.loaded == loaded, "what is not wanted any more is not tried again"


async def test_room_that_another_leaves_is_used_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "DROP_AFTER_S", 0.05)
    monkeypatch.setattr(keeper_module, "FIRST_RETRY_S", 1000.0)
    first = await store_adapter(site.bus, record("a", "first", "first"), None)
    keeper = site.make()
    await keeper.start("m")
    async with following(keeper):
        site.engine.is_passing_problem = True
        await store_adapter(site.bus, record("b", "second", "second"), None)
        await until_states(keeper, ("a", "first", True), ("b", "", False))
        site.engine.is_passing_problem = False
        await remove_adapter(site.bus, first)
        await until_states(keeper, ("b", "second", True))
        assert site.engine.dropped == ["first"]


async def test_a_late_answer_is_not_taken_for_that_of_the_next_load(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(keeper_module, "DROP_AFTER_S", 0.05)
    monkeypatch.setattr(keeper_module, "FIRST_RETRY_S", 1000.0)
    site.engine.is_silent = True
    stored = await store_adapter(site.bus, record("a", "first"), None)
    keeper = site.make()
    await keeper.start("m")
    assert "too long" in keeper.states[0].problem
    monkeypatch.setattr(keeper_module, "LOAD_TIMEOUT_S", 30.0)
    async with following(keeper):
        await store_adapter(site.bus, record("a", "second"), stored)
        await until(lambda: len(site.engine.unanswered) == 2)
        late, right = site.engine.unanswered
        keeper.on_loaded(late)
        await asyncio.sleep(0.05)
        assert keeper.states[0].digest == ""
        keeper.on_loaded(right)
        await until_states(keeper, ("a", "second", True))
        await until(lambda: bool(site.engine.dropped))
        assert site.engine.dropped == ["first"]


async def test_adapters_of_the_settings_are_loaded_and_put_on_record(site: Site, tmp_path: Path) -> None:
    keeper = site.make(lora=(f"a={site.folder}/first",))
    await keeper.start("m")
    stored = await find_adapter(site.bus, "a")
    assert stored is not None
    assert (stored.record.path, stored.record.digest, stored.record.model) == ("first", "first", "m")
    assert keeper.states == (LoadedAdapter("a", "first", "", stored.revision),)
    # Another worker of the same settings finds it there, and one with a newer content replaces it.
    await site.make(lora=(f"a={site.folder}/first",)).start("m")
    assert await find_adapter(site.bus, "a") == stored
    await site.make(lora=(f"a={site.folder}/second",)).start("m")
    changed = await find_adapter(site.bus, "a")
    assert changed is not None and changed.record.digest == "second"


async def test_a_folder_of_its_own_is_loaded_again_when_the_record_comes(site: Site, tmp_path: Path) -> None:
    keeper = site.make(lora=(f"a={site.folder}/first",), lora_dir="")
    await keeper.start("m")
    stored = await find_adapter(site.bus, "a")
    assert stored is not None and stored.record.path == ""
    assert [state.problem for state in keeper.states] == [""]
    # A worker that was not started with it cannot.
    other = site.make()
    await other.start("m")
    assert other.states[0].problem


async def test_an_adapter_of_the_settings_that_cannot_be_served_ends_the_start(site: Site) -> None:
    with pytest.raises(ConfigError, match="it is bad") as caught:
        await site.make(lora=(f"a={site.folder}/bad",)).start("m")
    assert caught.value.key == "lora"
    await store_adapter(site.bus, record("a", "first", model="other"), None)
    with pytest.raises(ConfigError, match="other"):
        await site.make(lora=(f"a={site.folder}/first",)).start("m")


@pytest.mark.parametrize("settings", [{"engine": "timing"}, {"tensor_parallel": 2}, {"lora_dir": ""}, {"max_loras": 0}])
async def test_who_serves_none_says_why(site: Site, settings: dict[str, Any]) -> None:
    await store_adapter(site.bus, record("a", "first", "first"), None)
    keeper = site.make(**settings)
    await keeper.start("m")
    assert "serves no adapters" in keeper.states[0].problem and site.engine.loaded == []
    if "lora_dir" not in settings:
        with pytest.raises(ConfigError):
            site.make(lora=("a=first",), **settings)


def test_given_pairs_and_their_places() -> None:
    assert list(parse_given(["a=/x/y", "b.c/d=~"])) == ["a", "b.c/d"]
    for bad in (["a"], ["=x"], ["a="], ["a b=x"], ["a=x", "a=y"]):
        with pytest.raises(ConfigError):
            parse_given(bad)
    assert path_below(Path("/srv/adapters/team/poet"), "/srv/adapters") == "team/poet"
    assert path_below(Path("/srv/adapters"), "/srv/adapters") == path_below(Path("/etc"), "/srv/adapters") == ""
