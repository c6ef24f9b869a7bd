"""The LoRA adapters that can be asked for by name, and which workers have them."""

from typing import NamedTuple

import structlog

from headrace_shared.adapter_records import MAX_ADAPTERS, StoredAdapter, stored_adapter
from headrace_shared.bus import Entry
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import AdapterRecord, Hello, LoadedAdapter, WorkerState
from headrace_shared.messages import WorkerId
from headrace_shared.subjects import adapter_key

WORKER_TIMEOUT_S = 3.0
"""A worker not heard of for so long does not count. They say hello every second."""
MAX_KNOWN = 64 * MAX_ADAPTERS
MAX_WORKERS = 10_000

log = structlog.get_logger(__name__)


class Answers(NamedTuple):
    """What the ready workers of a model have made of a record."""

    num_workers: int
    loaded: list[str]
    """Digests, one for each that serves it."""
    problems: list[str]
    """One for each that cannot."""

    @property
    def is_complete(self) -> bool:
        return self.num_workers <= len(self.loaded) + len(self.problems)


class _Worker(NamedTuple):
    hello: Hello
    heard_at: float


class AdapterTable:
    """`now` is monotonic time in seconds."""

    def __init__(self) -> None:
        self._adapters: dict[str, StoredAdapter] = {}
        """By key in the bucket."""
        self._keys: dict[str, str] = {}
        self._workers: dict[WorkerId, _Worker] = {}

    def find(self, name: str) -> AdapterRecord | None:
        """One that has been loaded by some worker."""
        key = self._keys.get(name)
        record = None if key is None else self._adapters[key].record
        return record if record is not None and record.digest else None

    def all(self) -> list[AdapterRecord]:
        """That have been loaded, by name."""
        records = [stored.record for stored in self._adapters.values() if stored.record.digest]
        return sorted(records, key=lambda record: record.name)

    def num_of(self, model: str) -> int:
        """On record."""
        return sum(stored.record.model == model for stored in self._adapters.values())

    def answers(self, stored: StoredAdapter, now: float) -> Answers:
        record = stored.record
        ready = [
            worker.hello
            for worker in self._workers.values()
            if worker.hello.model == record.model
            and worker.hello.state is WorkerState.READY
            and now - worker.heard_at <= WORKER_TIMEOUT_S
        ]
        said = [answer for hello in ready if (answer := _answer(hello, stored)) is not None]
        return Answers(
            len(ready),
            [answer.digest for answer in said if not answer.problem],
            [answer.problem for answer in said if answer.problem],
        )

    def on_change(self, entry: Entry | None, key: str) -> None:
        """Of the bucket ADAPTERS."""
        if entry is None:
            self.forget(key)
            return
        try:
            self.put(stored_adapter(entry))
        except ProtocolError as error:
            log.warning("record of an adapter is unusable", key=key, error=str(error))
            self.forget(key)

    def put(self, stored: StoredAdapter) -> None:
        """As it is, or was, on record."""
        key = adapter_key(stored.record.name)
        known = self._adapters.get(key)
        if known is None and len(self._adapters) >= MAX_KNOWN:
            return
        if known is None or known.revision <= stored.revision:
            self.forget(key)
            self._adapters[key] = stored
            self._keys[stored.record.name] = key

    def forget(self, key: str) -> None:
        known = self._adapters.pop(key, None)
        if known is not None:
            del self._keys[known.record.name]

    def on_hello(self, hello: Hello, now: float) -> None:
        if hello.state is WorkerState.LEAVING:
            self._workers.pop(hello.worker, None)
        elif hello.worker in self._workers or len(self._workers) < MAX_WORKERS:
            self._workers[hello.worker] = _Worker(hello, now)
        else:
            self._workers = {
                key: worker for key, worker in self._workers.items() if now - worker.heard_at <= WORKER_TIMEOUT_S
            }


def _answer(hello: Hello, stored: StoredAdapter) -> LoadedAdapter | None:
    """None: the worker has not dealt with this record yet."""
    return next(
        (said for said in hello.adapters if said.name == stored.record.name and said.revision >= stored.revision),
        None,
    )
