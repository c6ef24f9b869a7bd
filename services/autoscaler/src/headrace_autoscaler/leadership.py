"""Which autoscaler acts: the holder of one lease, whose epoch fences what it asks of engines and workers."""

import asyncio

import structlog

from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.leases import CHECK_S, Leases
from headrace_shared.subjects import AUTOSCALER_LEASE, LEASES

RETRY_S = 0.5

log = structlog.get_logger(__name__)


class Leadership:
    """`run` is its task."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self._bus = bus
        self._leases = Leases(bus, LEASES.name, holder)
        self._least_epoch = 1

    @property
    def epoch(self) -> int | None:
        """Of our lease; None while we do not lead. To be asked anew before each act."""
        lease = self._leases.held.get(AUTOSCALER_LEASE)
        return None if lease is None else lease.epoch

    async def run(self) -> None:
        """Takes the lease whenever it is free, and keeps it, until cancelled."""
        await self._open()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._leases.keep(lambda key: log.warning("no longer the leader")), name="keep-lease")
                group.create_task(self._take(), name="take-lease")
        finally:
            await self._leases.close()

    async def resign(self) -> None:
        """Lets another one lead at once."""
        try:
            await self._leases.release(AUTOSCALER_LEASE)
        except BusError as error:
            log.info("the lease was not given up, and will expire", error=str(error))

    async def climb(self, least: int) -> None:
        """Gives a lease of a lower epoch up, and takes it again with `least` or more: the broker has lost what it had
        counted, and workers obey no lower one."""
        self._least_epoch = max(self._least_epoch, least)
        epoch = self.epoch
        if epoch is not None and epoch < least:
            log.warning("workers know a higher epoch than ours", epoch=epoch, least=least)
            await self.resign()

    async def _open(self) -> None:
        while True:
            try:
                await self._bus.ensure_bucket(LEASES)
                await self._leases.open()
                return
            except BusError as error:
                log.info("no leases yet", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _make_bucket(self) -> None:
        try:
            await self._bus.ensure_bucket(LEASES)
        except BusError as error:
            log.info("no place for leases", error=str(error))

    async def _take(self) -> None:
        # What the watch reports first comes after `open`: before that every lease looks free.
        while True:
            await beat(CHECK_S)
            if self.epoch is None and self._leases.is_free(AUTOSCALER_LEASE) and self._bus.is_connected:
                try:
                    lease = await self._leases.acquire(AUTOSCALER_LEASE, self._least_epoch)
                except BusError as error:
                    log.info("the lease was not taken", error=str(error))
                    await asyncio.sleep(RETRY_S)
                    await self._make_bucket()  # it may have gone with the broker's disk
                    continue
                if lease is not None:
                    log.info("leads", epoch=lease.epoch)
