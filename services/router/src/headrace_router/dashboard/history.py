"""The last fifteen minutes: every frame as bytes, and the columns that the plots start from. Pure."""

from collections import deque
from collections.abc import Iterator

import msgspec

from headrace_shared.fleet_frame import Frame, Totals

NUM_FRAMES = 900
"""Fifteen minutes at one a second. At most about 10 KB each."""
MAX_FRAMES_AT_ONCE = 120

_COLUMNS = Totals.__struct_fields__


class History:
    def __init__(self, num_frames: int = NUM_FRAMES) -> None:
        self._frames: deque[tuple[int, float, Totals, bytes]] = deque(maxlen=num_frames)

    def add(self, frame: Frame) -> bytes:
        """Returns the frame as JSON."""
        data = msgspec.json.encode(frame)
        self._frames.append((frame.seq, frame.at, frame.totals, data))
        return data

    @property
    def latest(self) -> bytes | None:
        return self._frames[-1][3] if self._frames else None

    @property
    def latest_seq(self) -> int:
        """0 while there is none: frames are numbered from 1."""
        return self._frames[-1][0] if self._frames else 0

    def columns(self) -> bytes:
        """JSON: `seq`, `at` and every figure of the totals, as lists of equal length."""
        columns: dict[str, list[object]] = {"seq": [], "at": [], **{name: [] for name in _COLUMNS}}
        for seq, at, totals, _ in self._frames:
            columns["seq"].append(seq)
            columns["at"].append(at)
            for name in _COLUMNS:
                columns[name].append(getattr(totals, name))
        return msgspec.json.encode(columns)

    def frames(self, first: int, last: int) -> bytes:
        """JSON: the frames numbered `first` to `last` that are still there, at most MAX_FRAMES_AT_ONCE."""
        return b"[" + b",".join(self._between(first, last)) + b"]"

    def _between(self, first: int, last: int) -> Iterator[bytes]:
        last = min(last, first + MAX_FRAMES_AT_ONCE - 1)
        for seq, _, _, data in self._frames:
            if first <= seq <= last:
                yield data
