"""When those who were refused should come back, so that most of them get in. Pure.

Who is refused is told a time behind all those who were told one before and will come: so many times what lies between
two that the fleet can serve. Most clients never come back; how many do is learnt. Nothing is kept of an earlier guess
but the number of promises: while too many are expected clients are told to come late, but those who are refused
afterwards need not queue up behind an hour that nobody keeps. Who does come, at or after its time, is known by the
digest of what it sends, and may use the part of the queue that is kept for those. All routers hear of each other's
promises, and of who has come.
"""

import heapq
import struct
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_PROMISES = 50_000
MAX_EQUAL = 64
"""Promises of one digest: many clients may send the same."""
DIGEST_BYTES = 8
PROMISE_BYTES = DIGEST_BYTES + 2
"""On the wire: digest, and tenths of a second until the promise is due."""
EARLY_S = 0.5
"""A clock may run fast."""
LATE_S = 30.0
"""Who comes later has not come back."""
HORIZON_S = 100.0
"""Nobody is told more than this, plus jitter."""
MEMORY = 1000.0
"""Of about so many of the last promises it counts whether they were kept."""
FIRST_SHARE, TRUST = 0.5, 20.0
"""The guess of how many come back, which counts like so many promises."""
MIN_SHARE = 0.02


@dataclass(slots=True, order=True)
class _Promise:
    due_at: float
    digest: bytes
    model: str
    is_open: bool = True
    was_kept: bool = False


class Promises:
    def __init__(self) -> None:
        self._open: dict[bytes, list[_Promise]] = {}
        """The earliest first."""
        self._unsettled: list[_Promise] = []
        """A heap, of those that are not open any more too: all that were due at a time are counted at the same time.
        Otherwise whole crowds would seem to come before it is seen how many do not."""
        self._num_open: Counter[str] = Counter()
        """By model."""
        self._num_kept = FIRST_SHARE * TRUST
        self._num_lapsed = (1.0 - FIRST_SHARE) * TRUST

    def __len__(self) -> int:
        return self._num_open.total()

    @property
    def return_share(self) -> float:
        """Of those who were refused, who come back when they were told to."""
        return max(MIN_SHARE, self._num_kept / (self._num_kept + self._num_lapsed))

    def book(self, model: str, digest: bytes, free_in_s: float, spacing_s: float, now: float) -> float:
        """Seconds until the client is welcome. `free_in_s`: until the model's queue takes anybody; `spacing_s`: between
        two that it can take."""
        self.settle(now)
        wait_s = min(HORIZON_S, free_in_s + self.return_share * self._num_open[model] * spacing_s)
        self.add(model, digest, now + wait_s, now)
        return wait_s

    def add(self, model: str, digest: bytes, due_at: float, now: float) -> None:
        """A promise, of this router or another."""
        self.settle(now)
        promise = _Promise(due_at, digest, model)
        equal = self._open.setdefault(digest, [])
        insort(equal, promise)
        self._num_open[model] += 1
        heapq.heappush(self._unsettled, promise)
        if len(equal) > MAX_EQUAL:
            self._close(equal[0])
        while len(self._unsettled) > MAX_PROMISES:
            self._close(heapq.heappop(self._unsettled))

    def is_due(self, digest: bytes, now: float) -> bool:
        return self._due(digest, now) is not None

    def keep(self, digest: bytes, now: float) -> bool:
        """The client has come back: whether a promise was kept, which is then fulfilled."""
        promise = self._due(digest, now)
        if promise is None:
            return False
        promise.was_kept = True
        self._close(promise)
        return True

    def _due(self, digest: bytes, now: float) -> _Promise | None:
        equal = self._open.get(digest, ())
        return next((each for each in equal if each.due_at - EARLY_S <= now <= each.due_at + LATE_S), None)

    def settle(self, now: float) -> None:
        """Counts who has come and who has not, of those whose time is over."""
        while self._unsettled and self._unsettled[0].due_at + LATE_S < now:
            promise = heapq.heappop(self._unsettled)
            if promise.is_open or promise.was_kept:
                rest = 1.0 - 1.0 / MEMORY
                self._num_kept = rest * self._num_kept + promise.was_kept
                self._num_lapsed = rest * self._num_lapsed + (not promise.was_kept)
            self._close(promise)

    def _close(self, promise: _Promise) -> None:
        if promise.is_open:
            promise.is_open = False
            self._num_open[promise.model] -= 1
            if not self._num_open[promise.model]:
                del self._num_open[promise.model]
            equal = self._open[promise.digest]
            equal.remove(promise)
            if not equal:
                del self._open[promise.digest]


def pack(digest: bytes, due_in_s: float) -> bytes:
    return digest + struct.pack("<H", min(65535, round(10 * due_in_s)))


def pack_kept(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def unpack_kept(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed) - DIGEST_BYTES + 1, DIGEST_BYTES):
        yield packed[start : start + DIGEST_BYTES]


def unpack(packed: bytes) -> Iterator[tuple[bytes, float]]:
    """Digests and seconds; what is left of a broken one is dropped."""
    for start in range(0, len(packed) - PROMISE_BYTES + 1, PROMISE_BYTES):
        end = start + DIGEST_BYTES
        yield packed[start:end], struct.unpack_from("<H", packed, end)[0] / 10
