"""What all routers together know of the owners' shares of the store: the shell around `shares`."""

import asyncio
import secrets
import time

import structlog

from headrace_router.owners import owner_token
from headrace_router.responses_api.shares import ShareRecord, Shares
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Entry
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, ProtocolError
from headrace_shared.subjects import RESPONSE_SHARES

log = structlog.get_logger(__name__)

PERIOD_S = 0.25
"""An owner's count is told so often at most, however many responses are stored."""
RETRY_S = 2.0
CLOSE_S = 1.0


class ShareBook:
    """`run` is its task. What is counted here is told to the others a moment later, and outlives this router."""

    def __init__(self, bus: Bus, most: int) -> None:
        """`most`: bytes of one owner."""
        self._bus = bus
        self._writer = secrets.token_hex(8)
        self._shares = Shares(most, time.time)
        self._has_changed = asyncio.Event()

    async def open(self) -> None:
        """Returns when it is known what others have counted. Raises BusError."""
        await self._bus.ensure_bucket(RESPONSE_SHARES)
        await self._bus.watch(RESPONSE_SHARES.name, self._on_entry)

    def has_room(self, owner: str, num_bytes: int) -> bool:
        return self._shares.has_room(owner_token(owner), num_bytes)

    def fill(self, owner: str, num_bytes: int) -> None:
        self._shares.fill(owner_token(owner), num_bytes)
        self._has_changed.set()

    def free(self, owner: str, num_bytes: int, stored_at: float) -> None:
        """`stored_at`: seconds since the epoch."""
        self._shares.free(owner_token(owner), num_bytes, stored_at)
        self._has_changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            try:
                await self._tell()
                await beat(PERIOD_S)
            except BusError as error:
                log.info("shares of the response store not told yet", error=str(error))
                self._has_changed.set()
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._tell()
        except (BusError, TimeoutError) as error:
            log.info("shares of the response store not told", error=str(error))

    async def _tell(self) -> None:
        """Raises BusError."""
        owners = self._shares.take_changed()
        for number, owner in enumerate(owners):
            record = self._shares.record_of(owner)
            if record is None:
                continue
            try:
                await self._bus.put(RESPONSE_SHARES.name, f"{owner}.{self._writer}", encode(record))
            except BaseException:
                self._shares.put_back(owners[number:])
                raise

    def _on_entry(self, entry: Entry | None, key: str) -> None:
        owner, _, writer = key.partition(".")
        if writer == self._writer:
            return
        try:
            self._shares.tell(owner, writer, None if entry is None else decode(entry.value, ShareRecord))
        except ProtocolError as error:
            log.warning("undecodable count of stored responses", key=key, error=str(error))
