"""The flight recorder: what happened to the core, in chunks that can be read without those before.

A chunk begins, now and then, with the core's whole state (a keyframe): a reader starts there, and so it does not matter
that old chunks are dropped. Decisions are not written down, only their digest: whoever runs the events through the same
core gets the decisions themselves, and can tell that they are the same.
"""

import hashlib
from array import array
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import msgspec
from msgspec import Struct

from headrace_scheduler.decisions import Decisions
from headrace_scheduler.object_graph import ObjectGraph
from headrace_scheduler.scheduler import Scheduler

CHUNK_BYTES = 512 * 1024
"""A chunk is complete when it has so many."""
KEYFRAME_BYTES = 2 * 1024 * 1024
"""A keyframe follows after so many bytes of events, or its own size if that is more: so what the broker keeps holds one
of each of several schedulers."""
SMALL_KEYFRAME_BYTES = 256 * 1024
SMALL_KEYFRAME_S = 60.0
KEYFRAME_S = 900.0
"""At the latest, if the last was a small one, or not."""
MAX_STATE_BYTES = 8 * 1024 * 1024
"""A core with a larger state is not recorded: it would be a load on the broker. About 100,000 blocks."""
MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""Of chunks that wait to be fetched; above it recording starts anew with a keyframe."""

_MODULES = (
    "headrace_scheduler.admission",
    "headrace_scheduler.blocks",
    "headrace_scheduler.decisions",
    "headrace_scheduler.fairness",
    "headrace_scheduler.ledger",
    "headrace_scheduler.registry",
    "headrace_scheduler.scheduler",
    "headrace_scheduler.sequence",
    "headrace_scheduler.stay",
    "headrace_scheduler.suspects",
    "headrace_scheduler.waiting",
    "headrace_shared.messages",
    "headrace_shared.fleet_messages",
    "headrace_shared.record_messages",
)
"""Whose classes a core's state is made of."""

PASS = "schedule"
Record = tuple[str, msgspec.Raw]
"""(method, its arguments); for PASS (time, digest of what was decided)."""


class Chunk(Struct, frozen=True, array_like=True):
    scheduler: str
    number: int
    """Rises by one; a gap means that something is missing, and that reading goes on at the next keyframe."""
    begun_at: float
    """Seconds since the epoch, for people."""
    begun_now: float
    """The same moment in the time of the events."""
    fingerprint: str
    """Of the program that wrote it; empty without a keyframe."""
    keyframe: bytes
    """The core's state before the first event; empty: that after the last event of the chunk before."""
    records: list[Record]


class Recorder:
    """An `Observer` of one core at a time. Pure: time is an argument of `take`."""

    def __init__(self, scheduler_id: str) -> None:
        self._id = scheduler_id
        self._core: Scheduler | None = None
        self._records: list[Record] = []
        self._num_bytes = 0
        self._since_keyframe = 0
        self._keyframe_bytes = 0
        self._keyframe_at = 0.0
        self._keyframe = b""
        self._begun = (0.0, 0.0)
        self._number = 0
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode

    def attach(self, core: Scheduler, wall: float, now: float) -> None:
        """Records this core from now on. What was recorded of another and not taken is lost."""
        if self._core is not None:
            self._core.observer = None
        self._core = core
        self._number += 1  # a gap, if anything was lost
        self._begin(wall, now, is_keyframe=True)
        if self._core is not None:
            core.observer = self

    def detach(self) -> None:
        """Records nothing any more."""
        if self._core is not None:
            self._core.observer = None
            self._core = None
        self._records = []
        self._num_bytes = 0

    @property
    def is_recording(self) -> bool:
        return self._core is not None

    @property
    def is_due(self) -> bool:
        """A chunk is complete."""
        return self._num_bytes >= CHUNK_BYTES

    def take(self, wall: float, now: float) -> bytes | None:
        """What was recorded since the last call, encoded; None if nothing was. `wall`: seconds since the epoch; `now`:
        in the time of the events."""
        if not self._records:
            return None
        fingerprint = STATE.fingerprint if self._keyframe else ""
        chunk = Chunk(self._id, self._number, *self._begun, fingerprint, self._keyframe, self._records)
        data = self._encode(chunk)
        self._number += 1
        enough = max(KEYFRAME_BYTES, self._keyframe_bytes)
        latest_s = SMALL_KEYFRAME_S if self._keyframe_bytes < SMALL_KEYFRAME_BYTES else KEYFRAME_S
        self._begin(wall, now, self._since_keyframe >= enough or now - self._keyframe_at >= latest_s)
        return data

    def lost(self, wall: float, now: float) -> None:
        """Something that was taken could not be stored."""
        self._number += 1
        self._begin(wall, now, is_keyframe=True)

    def on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._add(name, self._encode(arguments))

    def on_pass(self, now: float, decisions: Decisions) -> None:
        self._add(PASS, self._encode((now, digest(decisions))))
        if self._num_bytes > MAX_BUFFERED_BYTES:
            # Nobody fetches it.
            self.lost(self._begun[0] + now - self._begun[1], now)

    def _add(self, name: str, arguments: bytes) -> None:
        self._records.append((name, msgspec.Raw(arguments)))
        self._num_bytes += len(arguments) + len(name)
        self._since_keyframe += len(arguments) + len(name)

    def _begin(self, wall: float, now: float, is_keyframe: bool) -> None:
        self._begun = (wall, now)
        self._records = []
        self._num_bytes = 0
        self._keyframe = b""
        if is_keyframe and self._core is not None:
            self._keyframe = dump_state(self._core)
            self._keyframe_bytes = len(self._keyframe)
            if self._keyframe_bytes > MAX_STATE_BYTES:
                self._keyframe = b""
                self.detach()
            self._keyframe_at = now
            self._since_keyframe = 0


def digest(decisions: Decisions) -> bytes:
    """Equal for equal decisions; empty if nothing was decided."""
    if not decisions.credits and not decisions.ended and not decisions.losses:
        return b""
    return hashlib.blake2b(msgspec.msgpack.encode(decisions, enc_hook=_plain), digest_size=8).digest()


def dump_state(core: Scheduler) -> bytes:
    observer, core.observer = core.observer, None
    try:
        return STATE.dump(core)
    finally:
        core.observer = observer


def load_state(data: bytes) -> Scheduler:
    """Raises ProtocolError."""
    core: Scheduler = STATE.load(data)
    return core


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"a {type(value).__qualname__} in an event")


def _classes_of(modules: Iterable[str]) -> list[type]:
    """Those that are defined there, in a fixed order."""
    named = {
        (kind.__module__, kind.__qualname__): kind
        for module in modules
        for kind in vars(import_module(module)).values()
        if isinstance(kind, type) and kind.__module__ == module
    }
    return [named[name] for name in sorted(named)]


STATE = ObjectGraph(_classes_of(_MODULES))
