"""Keeps the adapters of a worker's engine as the broker's records want them. Runs in the I/O process.

Those of the worker's own settings are loaded first, and put on record; then all that are on record of its model, before
the worker is ready; then it follows what changes. What is not wanted any more is out of Hello at once, and out of the
engine after a while: schedulers that have not heard of it yet may still send somebody. What could not be loaded is
tried again, less and less often, and at once when another adapter has left room: the reason may be gone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import structlog
from msgspec import Struct

from headrace_shared.adapter_records import (
    MAX_ADAPTERS,
    MAX_PROBLEM_CHARS,
    StoredAdapter,
    find_adapter,
    store_adapter,
    stored_adapter,
)
from headrace_shared.bus import Bus, Entry
from headrace_shared.errors import BusError, ConfigError, OutcomeUnknown, ProtocolError, RevisionConflict
from headrace_shared.fleet_messages import AdapterRecord, LoadedAdapter
from headrace_shared.subjects import ADAPTERS, adapter_key
from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.adapters.folder import allowed_folder
from headrace_worker.adapters.wanted import parse_given, path_below
from headrace_worker.engine_frames import AdapterLoaded, DropAdapter, LoadAdapter
from headrace_worker.settings import WorkerSettings

LOAD_TIMEOUT_S = 120.0
DROP_AFTER_S = 5.0
FIRST_RETRY_S = 10.0
MAX_RETRY_S = 600.0
"""Each try may read gigabytes, so what stays broken is tried seldom."""
_RETRY_S = 0.5

log = structlog.get_logger(__name__)


class _Failed(NamedTuple):
    stored: StoredAdapter
    again_at: float
    delay_s: float


class AdapterKeeper:
    """Belongs to one event loop. `on_change` is called when what Hello says has changed."""

    def __init__(
        self,
        bus: Bus,
        settings: WorkerSettings,
        send: Callable[[Struct], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError."""
        self._bus = bus
        self._given = parse_given(settings.lora)
        self._root = settings.lora_dir
        self._why_not = _why_not(settings)
        self._send = send
        self._on_change = on_change
        self._clock = clock
        self._model = ""
        self._states: dict[str, LoadedAdapter] = {}
        self._changes: dict[str, StoredAdapter | None] = {}
        """By key in the bucket: what is on record now, None: nothing. Not dealt with yet."""
        self._has_changes = asyncio.Event()
        self._answer: asyncio.Future[AdapterLoaded] | None = None
        self._asked = 0
        """Number of the last load that the engine was asked for."""
        self._failed: dict[str, _Failed] = {}
        """By key: what is to be tried again."""
        self._to_drop: list[tuple[float, str]] = []
        if self._why_not and self._given:
            raise ConfigError("lora", self._why_not)

    @property
    def states(self) -> tuple[LoadedAdapter, ...]:
        """For Hello."""
        return tuple(self._states.values())

    def on_loaded(self, frame: AdapterLoaded) -> None:
        """The engine's answer. What is loaded when nobody waits for it any more is not to keep its room."""
        if self._answer is not None and self._asked == frame.number and not self._answer.done():
            self._answer.set_result(frame)
        elif not frame.problem:
            self._drop_later(frame.digest)

    async def start(self, model: str) -> None:
        """Returns when everything that is wanted is loaded, as far as it can be. Raises ConfigError for an adapter of
        the settings that cannot."""
        self._model = model
        await self._until_done(lambda: self._bus.ensure_bucket(ADAPTERS))
        for name, folder in self._given.items():
            answer = await self._load(name, str(folder), "")
            if answer.problem:
                raise ConfigError("lora", f"{name}: {answer.problem}")
            self._states[name] = LoadedAdapter(name, answer.digest)
            log.info("adapter loaded", adapter=name, digest=answer.digest)
            record = AdapterRecord(
                name=name,
                model=model,
                path=path_below(folder, self._root),
                digest=answer.digest,
                created=int(time.time()),
            )
            await self._until_done(partial(self._put_on_record, record))
        entries: list[Entry] = []

        async def read() -> None:
            entries[:] = await self._bus.entries(ADAPTERS.name)

        await self._until_done(read)
        for entry in entries:
            self._note(entry, entry.key)
        await self._settle()

    async def run(self) -> None:
        """Follows the records for ever."""
        subscription = await self._bus.watch(ADAPTERS.name, self._note)
        try:
            while True:
                self._drop_due()
                self._retry_due()
                await self._settle()
                try:
                    async with asyncio.timeout(self._next_due_s()):
                        await self._has_changes.wait()
                except TimeoutError:
                    continue
        finally:
            await subscription.close()

    def _note(self, entry: Entry | None, key: str) -> None:
        stored = None
        if entry is not None:
            try:
                stored = stored_adapter(entry)
            except ProtocolError as error:
                log.warning("record of an adapter is unusable", key=key, error=str(error))
        if stored is not None and stored.record.model != self._model:
            stored = None
        self._changes[key] = stored
        self._failed.pop(key, None)
        self._has_changes.set()

    async def _settle(self) -> None:
        while self._changes:
            key, stored = next(iter(self._changes.items()))
            del self._changes[key]
            if stored is None:
                self._forget(key)
            else:
                await self._follow(stored)
        self._has_changes.clear()

    async def _follow(self, stored: StoredAdapter) -> None:
        record = stored.record
        known = self._states.get(record.name)
        if known is None and len(self._states) >= MAX_ADAPTERS:
            log.warning("too many adapters on record; one more is not noticed", adapter=record.name)
            return
        if known is not None and known.digest == record.digest and not known.problem:
            state = LoadedAdapter(record.name, known.digest, "", stored.revision)
        else:
            answer = await self._load_recorded(record)
            state = LoadedAdapter(record.name, answer.digest, answer.problem[:MAX_PROBLEM_CHARS], stored.revision)
            log.info("adapter", adapter=record.name, digest=answer.digest, problem=answer.problem)
            self._note_failure(stored, has_failed=bool(answer.problem) and not self._why_not)
        self._states[record.name] = state
        if known is not None and known.digest != state.digest:
            self._drop_later(known.digest)
        self._on_change()

    async def _load_recorded(self, record: AdapterRecord) -> AdapterLoaded:
        if self._why_not:
            return AdapterLoaded(name=record.name, digest="", problem=self._why_not)
        folder = self._given.get(record.name)
        try:
            if folder is None or record.path:
                folder = await asyncio.to_thread(allowed_folder, self._root, record.path)
        except AdapterRefused as refused:
            return AdapterLoaded(name=record.name, digest="", problem=str(refused))
        return await self._load(record.name, str(folder), record.digest)

    async def _load(self, name: str, folder: str, digest: str) -> AdapterLoaded:
        self._asked += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._send(LoadAdapter(name=name, folder=folder, digest=digest, number=self._asked))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                return await self._answer
        except TimeoutError:
            return AdapterLoaded(name=name, digest="", problem="loading it takes too long")
        finally:
            self._answer = None

    def _forget(self, key: str) -> None:
        for name in [name for name in self._states if adapter_key(name) == key]:
            state = self._states.pop(name)
            log.info("adapter not wanted any more", adapter=name)
            self._drop_later(state.digest)
            self._on_change()

    def _drop_later(self, digest: str) -> None:
        if digest:
            self._to_drop.append((self._clock() + DROP_AFTER_S, digest))
            self._has_changes.set()

    def _drop_due(self) -> None:
        now = self._clock()
        wanted = {state.digest for state in self._states.values() if not state.problem}
        for at, digest in self._to_drop:
            if at <= now and digest not in wanted:
                self._send(DropAdapter(digest=digest))
                # There may be room for others now.
                self._failed = {key: failed._replace(again_at=now) for key, failed in self._failed.items()}
        self._to_drop = [(at, digest) for at, digest in self._to_drop if at > now]

    def _note_failure(self, stored: StoredAdapter, *, has_failed: bool) -> None:
        key = adapter_key(stored.record.name)
        before = self._failed.pop(key, None)
        if has_failed and key not in self._changes:
            delay_s = FIRST_RETRY_S if before is None else min(2 * before.delay_s, MAX_RETRY_S)
            self._failed[key] = _Failed(stored, self._clock() + delay_s, delay_s)

    def _retry_due(self) -> None:
        now = self._clock()
        for key, failed in self._failed.items():
            if failed.again_at <= now:
                self._changes.setdefault(key, failed.stored)

    def _next_due_s(self) -> float | None:
        due = [at for at, _ in self._to_drop] + [failed.again_at for failed in self._failed.values()]
        return max(0.0, min(due) - self._clock()) if due else None

    async def _put_on_record(self, record: AdapterRecord) -> None:
        """What a worker is started with counts, also where another content was on record under its name."""
        while True:
            known = await find_adapter(self._bus, record.name)
            if known is not None and known.record.model != self._model:
                raise ConfigError("lora", f"{record.name} is an adapter of {known.record.model} already")
            if known is not None and (known.record.digest, known.record.path) == (record.digest, record.path):
                return
            try:
                await store_adapter(self._bus, record, known)
                return
            except (RevisionConflict, OutcomeUnknown):
                await asyncio.sleep(_RETRY_S)

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
                return
            except (BusError, ProtocolError) as error:
                log.warning("adapters are not on record yet", error=str(error))
                await asyncio.sleep(_RETRY_S)


def _why_not(settings: WorkerSettings) -> str:
    """Empty: it can serve adapters."""
    if settings.engine == "timing":
        return "a simulated worker serves no adapters"
    if settings.tensor_parallel > 1 or settings.pipeline_parallel > 1:
        return "a worker of several processes (tensor_parallel, pipeline_parallel) serves no adapters"
    if not settings.max_loras or not (settings.lora or settings.lora_dir):
        return "this worker serves no adapters (neither --lora nor --lora-dir is set, or --max-loras is 0)"
    return ""
