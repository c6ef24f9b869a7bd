"""Whether the token log takes what is published, in a cluster of brokers.

There the broker that leads the log may be lost while our own connection holds: until another is elected nobody stores
what we publish, and a router that was connected to the lost one has not heard it either. So the log is looked at, and
when it is back everything is published once more; routers drop what they have seen.
"""

import asyncio

import structlog

from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.subjects import TOKENS
from headrace_worker.session import Session

LOOK_S = 1.0
TIMEOUT_S = 2.0
"""An election takes at least 4 s: none can happen between two looks that were answered."""

log = structlog.get_logger(__name__)


class LogWatch:
    """`run` is its task."""

    def __init__(self, bus: Bus, session: Session) -> None:
        self._bus = bus
        self._session = session

    async def run(self) -> None:
        was_away = False
        while True:
            await asyncio.sleep(LOOK_S)
            if not await self._is_there():
                if not was_away:
                    log.warning("the token log does not answer")
                was_away = True
                continue
            if was_away:
                log.info("the token log is back: tokens are published again")
                self._session.publish_again()
                was_away = False
            self._session.mirror.on_log_seen()

    async def _is_there(self) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._bus.num_messages(TOKENS.name)
        except (BusError, TimeoutError):
            return False
        return True
