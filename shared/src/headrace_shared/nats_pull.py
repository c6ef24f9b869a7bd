"""Where the messages of one pull at a time arrive. A message is returned or given back, whatever is cancelled when."""

import asyncio
import time
from collections.abc import Callable

from headrace_shared.errors import BusUnavailable
from headrace_shared.nats_client import Incoming
from headrace_shared.nats_connection import NatsConnection, NatsSubscription


class PullSlot:
    """Kept for later pulls of the same consumer: a pull that was cancelled still waits at the broker, and what it
    brings goes to the next one. Not to be used again if its last message `may_be_lost`."""

    def __init__(self, connection: NatsConnection, give_back: Callable[[str, float], None], ack_wait_s: float) -> None:
        self._connection = connection
        self._give_back = give_back
        self._ack_wait_s = ack_wait_s
        self._asked_at = 0.0
        self._subscription: NatsSubscription | None = None
        self._waiter: asyncio.Future[Incoming | None] | None = None

    @classmethod
    async def open(
        cls, connection: NatsConnection, give_back: Callable[[str, float], None], ack_wait_s: float
    ) -> "PullSlot":
        slot = cls(connection, give_back, ack_wait_s)
        slot._subscription = await connection.listen(None, slot._on_reply)
        return slot

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    async def pull(self, call: str, ask: bytes, timeout_s: float) -> Incoming | None:
        """A message (it has `reply_to`), or a status, or None after `timeout_s`. Raises BusUnavailable."""
        assert self._subscription is not None and self._waiter is None, "one pull at a time"
        waiter: asyncio.Future[Incoming | None] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        self._asked_at = time.monotonic()
        on_loss = self._connection.expect(self._on_reply)
        try:
            self._connection.send(call, ask, None, self._subscription.subject)
            async with asyncio.timeout(timeout_s):
                reply = await waiter
        except TimeoutError:
            if not _has_result(waiter):
                return None
            reply = waiter.result()
        except BaseException:
            if _has_result(waiter):
                self._waiter = None
                self._on_reply(waiter.result())
            raise
        finally:
            self._waiter = None
            self._connection.forget(on_loss)
        if reply is None:
            raise BusUnavailable("the connection broke")
        return None if reply.reply_to and self.may_be_lost else reply

    def _on_reply(self, reply: Incoming | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(reply)
        elif reply is not None and reply.reply_to and not self.may_be_lost:
            self._give_back(reply.reply_to, 0.0)

    @property
    def may_be_lost(self) -> bool:
        """What comes so long after we asked, as when we were frozen, may have another owner, whom the broker would not
        protect from us. The ack wait settles it."""
        return time.monotonic() - self._asked_at >= self._ack_wait_s


def _has_result(waiter: "asyncio.Future[Incoming | None]") -> bool:
    """Something came in the same moment as the end of the wait."""
    return waiter.done() and not waiter.cancelled()
