"""The parts of the Responses API, put together."""

import asyncio

from headrace_router.calls import Caller
from headrace_router.cancellation import Canceller
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models
from headrace_router.preparation import Preparer
from headrace_router.presence import Presence
from headrace_router.responses_api.background import BackgroundResponses
from headrace_router.responses_api.creation import ResponseCreator
from headrace_router.responses_api.kept_responses import KeptResponses
from headrace_router.responses_api.routes import ResponsesParts
from headrace_router.responses_api.store import ResponseStore
from headrace_shared.bus import Bus
from headrace_shared.messages import RouterId


class Responses:
    """`run` is its task."""

    def __init__(
        self,
        bus: Bus,
        router: RouterId,
        caller: Caller,
        preparer: Preparer,
        models: Models,
        canceller: Canceller,
        presence: Presence,
        metrics: RouterMetrics,
        ping_interval_s: float,
    ) -> None:
        self._store = store = ResponseStore(bus)
        self._background = background = BackgroundResponses(
            bus=bus,
            router=router,
            caller=caller,
            canceller=canceller,
            store=store,
            presence=presence,
            metrics=metrics,
        )
        kept = KeptResponses(
            bus=bus, caller=caller, models=models, store=store, background=background, ping_interval_s=ping_interval_s
        )
        creator = ResponseCreator(
            caller=caller, preparer=preparer, models=models, store=store, background=background, kept=kept
        )
        self.parts = ResponsesParts(creator, kept)

    async def open(self) -> None:
        """Raises BusError."""
        await self._store.open(self._background.on_unfinished)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._store.run(), name="response-shares")
            await self._background.run()

    async def close(self) -> None:
        await self._background.close()
        await self._store.close()
