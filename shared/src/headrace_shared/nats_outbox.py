"""What is published goes out at once, or, as long as the broker does not read, into a bounded queue that one task
empties in order. Pure asyncio; knows no nats."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

import structlog

from headrace_shared.errors import BusOverloaded, BusUnavailable, OutcomeUnknown, PayloadTooLarge
from headrace_shared.tasks import end

RETRY_S = 0.1

log = structlog.get_logger(__name__)

Send = Callable[[str, bytes, Mapping[str, str] | None], None]


class Outbox:
    """`put` never waits. What is queued when the connection breaks is lost, never sent later."""

    MAX_MESSAGES: ClassVar[int] = 65_536
    MAX_BYTES: ClassVar[int] = 32 * 1024 * 1024
    HIGH_WATER_BYTES: ClassVar[int] = 256 * 1024
    """With more unsent bytes below us, everything waits until the broker has read them."""

    def __init__(
        self, send: Send, is_backed_up: Callable[[], bool], wait_until_read: Callable[[], Awaitable[None]]
    ) -> None:
        self._send = send
        self._is_backed_up = is_backed_up
        self._wait_until_read = wait_until_read
        self._queue: deque[tuple[str, bytes, Mapping[str, str] | None]] = deque()
        self._num_bytes = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._task: asyncio.Task[None] | None = None

    def put(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Raises BusOverloaded."""
        if not self._queue and not self._is_backed_up():
            self._hand_over(subject, data, headers)
            return
        if len(self._queue) >= self.MAX_MESSAGES or self._num_bytes + len(data) > self.MAX_BYTES:
            raise BusOverloaded(f"{len(self._queue)} messages, {self._num_bytes} bytes wait to be sent")
        self._queue.append((subject, data, headers))
        self._num_bytes += len(data)
        if len(self._queue) == 1:
            self._filled.set()
            self._emptied.clear()

    def start(self) -> None:
        self._task = asyncio.create_task(self._drain(), name="nats-outbox")

    async def stop(self) -> None:
        """Forgets what is queued."""
        task, self._task = self._task, None
        self._queue.clear()
        self._num_bytes = 0
        self._filled.clear()
        self._emptied.set()
        if task is not None:
            await end(task)

    async def flush(self) -> None:
        """Returns when all is handed over."""
        await self._emptied.wait()

    def _hand_over(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        try:
            # PayloadTooLarge: the broker's limit fell while the message waited.
            with contextlib.suppress(BusUnavailable, PayloadTooLarge):
                self._send(subject, data, headers)
        except Exception:
            # A fault below us costs this message, and not all that will ever be published.
            log.exception("message not sent", subject=subject)

    async def _drain(self) -> None:
        queue = self._queue
        while True:
            await self._filled.wait()
            while queue:
                while self._is_backed_up():
                    try:
                        await self._wait_until_read()
                    except (BusUnavailable, OutcomeUnknown):
                        await asyncio.sleep(RETRY_S)  # until the connection is declared lost, which stops us
                subject, data, headers = queue.popleft()
                self._num_bytes -= len(data)
                self._hand_over(subject, data, headers)
            self._filled.clear()
            self._emptied.set()
