"""When those who were refused should come back, so that most of them get in. Pure.

Who is refused is told a time, and that time is booked: the next one is told a later one, as far apart as the fleet can
serve them. Most clients never come back, so bookings are as dense as clients have come back lately. Who does, at or
after its time, is known by the digest of what it sends, and may use the part of the queue that is kept for those.
"""

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

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
STEP = 0.02
FIRST_SHARE = 0.5


class Promises:
    def __init__(self) -> None:
        self._due: OrderedDict[bytes, deque[float]] = OrderedDict()
        self._next_at = 0.0
        self._share = FIRST_SHARE
        """Of those who were refused, who come back when they were told to."""
        self._num_promised = 0

    def __len__(self) -> int:
        return self._num_promised

    @property
    def return_share(self) -> float:
        return self._share

    def book(self, digest: bytes, free_in_s: float, spacing_s: float, now: float) -> float:
        """Seconds until the client is welcome. `free_in_s`: until the queue takes anybody; `spacing_s`: between two
        that it can take."""
        at = max(now + free_in_s, self._next_at)
        if at <= now + HORIZON_S:
            self._next_at = at + spacing_s * max(self._share, STEP)
        at = min(at, now + HORIZON_S)
        self.add(digest, at, now)
        return at - now

    def add(self, digest: bytes, due_at: float, now: float) -> None:
        """A promise, of this router or another."""
        self._expire(now)
        dues = self._due.setdefault(digest, deque())
        self._due.move_to_end(digest)
        dues.append(due_at)
        self._num_promised += 1
        if len(dues) > MAX_EQUAL:
            dues.popleft()
            self._num_promised -= 1
        while self._num_promised > MAX_PROMISES:
            _, oldest = self._due.popitem(last=False)
            self._num_promised -= len(oldest)

    def is_due(self, digest: bytes, now: float) -> bool:
        dues = self._due.get(digest)
        return dues is not None and any(due - EARLY_S <= now <= due + LATE_S for due in dues)

    def keep(self, digest: bytes, now: float) -> bool:
        """The client has come back: whether a promise was kept, which is then fulfilled."""
        dues = self._due.get(digest)
        due = next((due for due in dues or () if due - EARLY_S <= now <= due + LATE_S), None)
        if dues is None or due is None:
            return False
        dues.remove(due)
        self._num_promised -= 1
        if not dues:
            del self._due[digest]
        self._share += STEP * (1.0 - self._share)
        return True

    def _expire(self, now: float) -> None:
        """Looks at the promises that were made first only: those of one digest expire with its latest."""
        while self._due:
            digest, dues = next(iter(self._due.items()))
            if not _all_past(dues, now):
                return
            del self._due[digest]
            self._num_promised -= len(dues)
            self._share *= (1.0 - STEP) ** len(dues)


def pack(digest: bytes, due_in_s: float) -> bytes:
    return digest + struct.pack("<H", min(65535, round(10 * due_in_s)))


def unpack(packed: bytes) -> Iterator[tuple[bytes, float]]:
    """Digests and seconds; what is left of a broken one is dropped."""
    for start in range(0, len(packed) - PROMISE_BYTES + 1, PROMISE_BYTES):
        end = start + DIGEST_BYTES
        yield packed[start:end], struct.unpack_from("<H", packed, end)[0] / 10


def _all_past(dues: Iterable[float], now: float) -> bool:
    return all(due + LATE_S < now for due in dues)
