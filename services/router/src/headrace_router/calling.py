"""Puts together what takes calls from their bodies to the queue, and what becomes of them back to their clients."""

import math
import time

from headrace_router.accounts import Accounts
from headrace_router.attachments import Attachments
from headrace_router.call_status import CallStatus
from headrace_router.call_store import CallStore
from headrace_router.calls import Caller
from headrace_router.cancellation import Canceller
from headrace_router.capacities import Capacities
from headrace_router.gate import Gate, GateSettings, RefusalStatuses
from headrace_router.generation import Limits
from headrace_router.grammar_checks import GrammarChecks
from headrace_router.inflight import InFlightTable
from headrace_router.key_table import KeyTable
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models
from headrace_router.overflow import Overflow, parse_overflow
from headrace_router.preparation import Preparer
from headrace_router.presence import Presence
from headrace_router.promises import Promises
from headrace_router.queue_limits import QueueLimits
from headrace_router.queue_metrics import QueueMetrics
from headrace_router.queue_watch import QueueWatch
from headrace_router.runner import CallSettings, Runner
from headrace_router.settings import RouterSettings
from headrace_router.streams import StreamKeeper
from headrace_router.template_pool import TemplatePool
from headrace_router.tokenization import PromptPool, load_encoder
from headrace_router.unattended import Unattended
from headrace_shared.bus import Bus
from headrace_shared.messages import RouterId
from headrace_shared.patience import patiently
from headrace_shared.service import Service
from headrace_shared.subjects import CANCELS, TOKENS, requests_stream
from headrace_shared.telemetry import NUM_IN_FLIGHT


class Calling:
    """In this order: made, `open`, `spawn`, `close`."""

    def __init__(self, service: Service, bus: Bus, settings: RouterSettings) -> None:
        """Raises ConfigError."""
        self._bus = bus
        self._smaller = parse_overflow(settings.overflow)
        queue = requests_stream(settings.queue_max_messages, settings.queue_max_bytes)
        self.router = RouterId(service.id)
        self.table = InFlightTable(bus, self.router)
        self._streams = StreamKeeper(bus, (queue, TOKENS, CANCELS), self.table.on_queue_lost)
        self.canceller = Canceller(bus, self.table)
        self._store = CallStore(bus)
        self._attachments = Attachments(
            bus, self.router, self.canceller.abort, settings.reattach_timeout_s, time.monotonic
        )
        self.keys = KeyTable(are_required=settings.require_keys)
        self.presence = Presence(self.router, time.monotonic)
        self.accounts = Accounts(bus, self.router, self.presence, self.keys.has)
        self._grammars = GrammarChecks()
        self._templates = TemplatePool()
        self._pool = PromptPool(settings.tokenizer_threads, settings.max_waiting_prompts)
        capacities, promises = Capacities(), Promises()
        self.models = Models(time.monotonic, capacities)
        self.metrics = RouterMetrics(service.metrics)
        self._queue_metrics = QueueMetrics(service.metrics)
        self._watch = QueueWatch(bus, self.router, capacities, promises, self._queue_metrics.observed)
        overflow = Overflow(self._smaller, settings.overflow_above_s, settings.overflow_below_s)
        gate_settings = _gate_settings(settings)
        gate = Gate(self.models, self._watch, capacities, promises, overflow, self._queue_metrics, gate_settings)
        call_settings = _call_settings(settings)
        self._unattended = Unattended(bus, self.table, self.canceller, call_settings.limits)
        self._runner = Runner(
            bus=bus,
            table=self.table,
            canceller=self.canceller,
            attachments=self._attachments,
            unattended=self._unattended,
            store=self._store,
            tracker=self._watch,
            settings=call_settings,
        )
        self.preparer = Preparer(self._pool, self._templates, self._grammars)
        self.caller = Caller(
            bus=bus,
            router=self.router,
            models=self.models,
            preparer=self.preparer,
            gate=gate,
            accounts=self.accounts,
            canceller=self.canceller,
            store=self._store,
            runner=self._runner,
            status=CallStatus(bus, self._runner.active, self._watch),
            settings=call_settings,
        )

    async def open(self) -> None:
        """Raises BusError."""
        await self._streams.start()
        await self.table.start()
        await self._store.open()
        await self._attachments.start()
        await self.keys.open(self._bus)
        await self.accounts.open()
        self._templates.warm_up()
        await self._watch.open()

    def spawn(self, service: Service) -> None:
        """All that goes on beside calls."""
        service.spawn(self._streams.run(), "streams")
        service.spawn(patiently(self._follow_models, math.inf), "models")
        service.spawn(self._watch.run(), "queue-watch")
        service.spawn(self.accounts.run(), "accounts")
        service.spawn(self._attachments.run(), "attachments")

    async def _follow_models(self) -> None:
        await self.models.follow(self._bus, lambda card: load_encoder(card, self._templates.learn))

    async def close(self) -> None:
        await self._unattended.close()
        await self.canceller.close()
        await self.table.close()
        await self.accounts.close()
        self._pool.close()
        await self._templates.close()
        await self._grammars.close()

    def not_ready(self) -> str | None:
        """Why nobody should be sent here now."""
        if not self._bus.is_connected:
            return "the broker is not connected"
        if self._runner.queue_health.is_doubtful:
            return "the queue does not answer"
        # A model at zero that requests will wake is in order.
        if self.models.num_ready_workers() == 0 and not self.models.can_wake:
            return "no worker is ready"
        return None

    def gauges(self) -> dict[str, float]:
        """For Telemetry."""
        own = self.metrics.journal.gauges(time.monotonic())
        spilled = self._queue_metrics.overflow_gauges(self._smaller.values())
        in_flight = {NUM_IN_FLIGHT: float(len(self.table))}
        return {**in_flight, **own, **self._watch.gauges(), **self.models.wanted(), **spilled}


def _call_settings(settings: RouterSettings) -> CallSettings:
    limits = Limits(
        request_timeout_s=settings.request_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        publish_timeout_s=settings.publish_timeout_s,
        buffer=settings.stream_buffer,
    )
    return CallSettings(
        limits,
        settings.max_inflight,
        settings.ping_interval_s,
        shares_cache=settings.cache_sharing == "all",
        queue_report_interval_s=settings.queue_report_interval_s,
        queue_full_status=settings.queue_full_status,
    )


def _gate_settings(settings: RouterSettings) -> GateSettings:
    return GateSettings(
        limits=QueueLimits(settings.max_queued_requests, settings.max_queued_tokens, settings.max_wait_s),
        statuses=RefusalStatuses(settings.queue_full_status, settings.overloaded_status),
        request_timeout_s=settings.request_timeout_s,
        no_worker_patience_s=settings.no_worker_patience_s,
    )
