"""Background calls whose client has left. They need no client, but an end: stop strings are found in text, and only
routers have text."""

import asyncio

import structlog

from headrace_router.accounts import Charge
from headrace_router.call import Plan
from headrace_router.call_record import Dialect, prompts_of, record_of
from headrace_router.cancellation import Canceller
from headrace_router.generation import Generation, Limits
from headrace_router.inflight import InFlightTable
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, RequestError

log = structlog.get_logger(__name__)

MAX_CALLS = 1000
"""Beyond it, and after the death of this router, such a call runs to its `max_tokens`; its answer is the same."""
POLL_S = 60.0


class Unattended:
    def __init__(self, bus: Bus, table: InFlightTable, canceller: Canceller, limits: Limits) -> None:
        self._bus = bus
        self._table = table
        self._canceller = canceller
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, plan: Plan, charge: Charge) -> None:
        """Reads the call's answer to its end, if that may come before the worker knows, or if it counts."""
        if plan.form.dialect is Dialect.RESPONSES:
            return  # whoever stores it reads it
        if not (plan.form.stop_strings or charge.is_limited) or len(self._tasks) >= MAX_CALLS:
            return
        task = asyncio.create_task(self._read(plan, charge.detached()), name="unattended")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, plan: Plan, charge: Charge) -> None:
        record = record_of("", plan.created, plan.form, plan.prompts)
        generation = Generation(
            prompts_of(record, plan.model),
            bus=self._bus,
            table=self._table,
            canceller=self._canceller,
            limits=self._limits._replace(request_timeout_s=plan.timeout_s),
            leave=lambda queued, reason: None,
            follows=True,
        )
        is_read = False
        try:
            async with generation:
                while not generation.is_complete:
                    await generation.next(POLL_S)
            is_read = True
        except (RequestError, BusError) as error:
            log.info("background call not watched any more", request_id=plan.request_id, reason=str(error))
        finally:
            used = generation.usage.prompt_tokens + generation.usage.completion_tokens
            # What goes on unread, also when this router stops, is paid for in advance.
            charge.settle(used if is_read else max(used, charge.num_tokens))
            charge.close()
