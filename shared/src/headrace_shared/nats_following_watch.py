"""Watching a bucket without a consumer, for those who may not make any: whoever hears that something is written looks.

What is heard is no proof that it was stored, so the bucket is read each time, as a whole: for small ones only.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from headrace_shared.bus import WatchHandler
from headrace_shared.errors import BusError
from headrace_shared.nats_connection import NatsConnection, NatsSubscription
from headrace_shared.nats_kv import KeyValue
from headrace_shared.nats_link import Incoming
from headrace_shared.nats_watch import tell
from headrace_shared.subjects import bucket_subject
from headrace_shared.tasks import end

log = structlog.get_logger(__name__)

LOOKS_S = (0.02, 0.5)
"""After something was heard, which the broker may store only then."""
PERIOD_S = 5.0
"""Messages may be lost."""


class FollowingWatch:
    def __init__(
        self,
        connection: NatsConnection,
        buckets: KeyValue,
        followed: tuple[str, str],
        handler: WatchHandler,
        on_close: Callable[["FollowingWatch"], None],
    ) -> None:
        """`followed`: bucket and pattern of keys."""
        self._connection = connection
        self._buckets = buckets
        self._bucket, self._keys = followed
        self._heard = asyncio.Event()
        self._subscription: NatsSubscription | None = None
        self._handler = handler
        self._on_close = on_close
        self._known: dict[str, int] = {}
        """Revisions that were reported."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns when the handler has got every key that exists. Raises BusError."""
        try:
            self._subscription = await self._connection.listen(
                bucket_subject(self._bucket, self._keys), self._on_message
            )
            await self._look()
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._follow(), name=f"watch-{self._bucket}")

    async def close(self) -> None:
        self._on_close(self)
        if self._task is not None:
            await end(self._task)
        if self._subscription is not None:
            await self._subscription.close()

    def _on_message(self, _: Incoming) -> None:
        self._heard.set()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._heard.wait()
            pauses_s = LOOKS_S if self._heard.is_set() else (0.0,)
            self._heard.clear()
            for pause_s in pauses_s:
                await asyncio.sleep(pause_s)
                try:
                    await self._look()
                except BusError as error:
                    log.debug("looking again", error=str(error), bucket=self._bucket)

    async def _look(self) -> None:
        entries = {entry.key: entry for entry in await self._buckets.entries(self._bucket, "")}
        for key in sorted(self._known.keys() - entries.keys()):
            del self._known[key]
            tell(self._handler, self._bucket, None, key)
        for key, entry in entries.items():
            if self._known.get(key) != entry.revision:
                self._known[key] = entry.revision
                tell(self._handler, self._bucket, entry, key)
