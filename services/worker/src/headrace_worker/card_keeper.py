"""Keeps the model's card in the broker: routers read it there, and one that starts without it knows no model."""

import asyncio

import structlog

from headrace_shared.bus import Bus
from headrace_shared.errors import BusError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.model_cards import has_card, store_card

RETRY_S = 0.5
CHECK_S = 5.0

log = structlog.get_logger(__name__)


class CardKeeper:
    def __init__(self, bus: Bus, card: ModelCard) -> None:
        self._bus = bus
        self._card = card

    async def store(self) -> None:
        """A worker whose card is not in the broker would be of no use to any router."""
        while True:
            try:
                await store_card(self._bus, self._card)
                return
            except BusError as error:
                log.warning("model card not stored yet", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Stores it again where the broker has lost it. Until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if await has_card(self._bus, self._card.model):
                    continue
            except BusError as error:  # it is away, or its buckets are
                log.debug("model card not seen", error=str(error))
                continue
            log.warning("the broker has lost the model card: storing it again", model=self._card.model)
            await self.store()
