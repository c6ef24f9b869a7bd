"""The stream of frames to one page, as server-sent events; `event: past` first, then a `frame` a second."""

import asyncio
from collections.abc import AsyncIterator

from headrace_router.dashboard.collector import Collector
from headrace_shared.errors import Overloaded

MAX_WATCHERS = 64


class Watchers:
    """All pages that are open. They end when `draining` is set, so that no page holds up the router's end."""

    def __init__(self, collector: Collector, draining: asyncio.Event) -> None:
        self._collector = collector
        self._draining = draining
        self._num_watchers = 0

    def check(self) -> None:
        """Raises Overloaded."""
        if self._num_watchers >= MAX_WATCHERS:
            raise Overloaded("Too many pages watch this router.", retry_after_s=5.0, code="too_many_watchers")

    async def stream(self, boot: str) -> AsyncIterator[bytes]:
        """`boot` names this start of the router: numbers of frames begin anew with it."""
        self._num_watchers += 1
        try:
            past = self._collector.history.columns()
            yield b"event: past\ndata: {" + f'"boot":"{boot}",'.encode() + b'"columns":' + past + b"}\n\n"
            seq = self._collector.history.latest_seq
            while (data := await self._next(seq)) is not None:
                seq = self._collector.history.latest_seq
                yield b"event: frame\ndata: " + data + b"\n\n"
        finally:
            self._num_watchers -= 1

    async def _next(self, seq: int) -> bytes | None:
        """None: the router is about to end."""
        frame = asyncio.ensure_future(self._collector.next_frame(seq))
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait((frame, draining), return_when=asyncio.FIRST_COMPLETED)
            return frame.result() if frame.done() else None
        finally:
            frame.cancel()
            draining.cancel()
