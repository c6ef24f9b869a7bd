"""The router's shell: connects the parts, serves, drains."""

import asyncio
import contextlib
import socket
import time

import structlog

from headrace_router.accounts import Accounts
from headrace_router.adapter_admin import AdapterAdmin
from headrace_router.app import make_app
from headrace_router.attachments import Attachments
from headrace_router.authentication import Door
from headrace_router.batches.assembly import open_storage
from headrace_router.batches.endpoints import batch_endpoints
from headrace_router.batches.runner import BatchRunner
from headrace_router.bodies import BodyLimits, ByteBudget
from headrace_router.browser_guard import Guard, Origins
from headrace_router.call_response import ClientLimits
from headrace_router.call_status import CallStatus
from headrace_router.call_store import CallStore
from headrace_router.call_trace import CallTraces
from headrace_router.calls import Caller
from headrace_router.cancellation import Canceller
from headrace_router.capacities import Capacities
from headrace_router.connection_counts import ConnectionCounts
from headrace_router.dashboard.assembly import start_dashboard
from headrace_router.gate import Gate, GateSettings, RefusalStatuses
from headrace_router.generation import Limits
from headrace_router.grammar_checks import GrammarChecks
from headrace_router.host_names import HostNames
from headrace_router.inflight import InFlightTable
from headrace_router.key_table import KeyTable
from headrace_router.messages_api.service import MessagesService
from headrace_router.metrics import RouterMetrics
from headrace_router.models import Models
from headrace_router.overflow import Overflow, parse_overflow
from headrace_router.preparation import Preparer
from headrace_router.presence import Presence
from headrace_router.promises import Promises
from headrace_router.queue_limits import QueueLimits
from headrace_router.queue_metrics import QueueMetrics
from headrace_router.queue_watch import QueueWatch
from headrace_router.responses_api.responses import Responses
from headrace_router.routes import Parts
from headrace_router.runner import CallSettings, Runner
from headrace_router.settings import RouterSettings
from headrace_router.streams import StreamKeeper
from headrace_router.template_pool import TemplatePool
from headrace_router.tokenization import PromptPool, load_encoder
from headrace_router.unattended import Unattended
from headrace_router.web_server import WebServer, listen, make_server, room_for_connections
from headrace_shared.bus import Bus
from headrace_shared.errors import Overloaded
from headrace_shared.messages import RouterId
from headrace_shared.service import Service
from headrace_shared.service_bus import service_bus
from headrace_shared.subjects import CANCELS, TOKENS, requests_stream
from headrace_shared.telemetry import NUM_IN_FLIGHT

log = structlog.get_logger(__name__)

FIRST_READ_S = 5.0
"""The most that the door stays shut at the start for cards to be read."""
BODIES_AT_ONCE = 16
"""So many of the largest bodies, or more smaller ones, may be coming at a time."""
CUT_S = 2.0
"""Before the end of the drain time, what is still running is told that it ends."""


class RouterService:
    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    async def __call__(self, service: Service) -> None:
        """The body for `run_service`."""
        # A port that is taken ends the start before anything else is done.
        listener = listen(self._settings.host, self._settings.port, self._settings.send_timeout_s)
        with contextlib.closing(listener):
            async with service_bus(service, self._settings) as bus:
                await self.serve(service, bus, listener)

    async def serve(self, service: Service, bus: Bus, listener: socket.socket) -> None:
        """Serves on `listener` until the service drains and the answers are finished."""
        settings = self._settings
        guard = _guard(settings)
        smaller = parse_overflow(settings.overflow)
        queue = requests_stream(settings.queue_max_messages, settings.queue_max_bytes)
        streams = StreamKeeper(bus, (queue, TOKENS, CANCELS))
        await streams.start()
        router = RouterId(service.id)
        table = InFlightTable(bus, router)
        await table.start()
        canceller = Canceller(bus, table)
        store = CallStore(bus)
        await store.open()
        attachments = Attachments(bus, router, canceller.abort, settings.reattach_timeout_s, time.monotonic)
        await attachments.start()
        keys = KeyTable(are_required=settings.require_keys)
        await keys.open(bus)
        presence = Presence(router, time.monotonic)
        accounts = Accounts(bus, router, presence, keys.has)
        await accounts.open()
        grammars = GrammarChecks()
        templates = TemplatePool()
        templates.warm_up()
        pool = PromptPool(settings.tokenizer_threads, settings.max_waiting_prompts)
        capacities, promises = Capacities(), Promises()
        models = Models(time.monotonic, capacities)
        metrics = RouterMetrics(service.metrics)
        queue_metrics = QueueMetrics(service.metrics)
        watch = QueueWatch(bus, router, capacities, promises, queue_metrics.observed)
        await watch.open()
        overflow = Overflow(smaller, settings.overflow_above_s, settings.overflow_below_s)
        call_settings = _call_settings(settings)
        unattended = Unattended(bus, table, canceller, call_settings.limits)
        runner = Runner(
            bus=bus,
            table=table,
            canceller=canceller,
            attachments=attachments,
            unattended=unattended,
            store=store,
            tracker=watch,
            settings=call_settings,
        )
        preparer = Preparer(pool, templates, grammars)
        caller = Caller(
            bus=bus,
            router=router,
            models=models,
            preparer=preparer,
            gate=Gate(models, watch, capacities, promises, overflow, queue_metrics, _gate_settings(settings)),
            accounts=accounts,
            canceller=canceller,
            store=store,
            runner=runner,
            status=CallStatus(bus, runner.active, watch),
            settings=call_settings,
        )

        responses = Responses(
            bus, router, caller, preparer, models, canceller, presence, metrics, settings.ping_interval_s
        )
        await responses.open()
        messages = MessagesService(caller, preparer, models)

        def not_ready() -> str | None:
            if not bus.is_connected:
                return "the broker is not connected"
            if runner.queue_health.is_doubtful:
                return "the queue does not answer"
            # A model at zero that requests will wake is in order.
            if models.num_ready_workers() == 0 and not models.can_wake:
                return "no worker is ready"
            return None

        def gauges() -> dict[str, float]:
            own = metrics.journal.gauges(time.monotonic())
            spilled = queue_metrics.overflow_gauges(smaller.values())
            return {NUM_IN_FLIGHT: float(len(table)), **own, **watch.gauges(), **models.wanted(), **spilled}

        budget = ByteBudget(BODIES_AT_ONCE * settings.max_body_bytes)
        body_limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s, budget)
        limits = ClientLimits(body_limits, settings.send_timeout_s)
        dashboard = start_dashboard(service, bus, models, metrics.journal) if settings.dashboard else None
        door = Door(keys, settings.open_metrics, accounts.headers, has_pages=dashboard is not None)
        traces = CallTraces(service.tracing, settings.trace_content) if service.tracing is not None else None
        endpoints = batch_endpoints(caller, responses.parts.creator.create)
        storage = await open_storage(bus, router, caller, endpoints, keys, accounts, metrics, settings)
        admin = AdapterAdmin(bus, models, models.adapters)
        app = make_app(
            Parts(
                caller,
                models,
                pool,
                preparer,
                metrics,
                limits,
                service.not_ready,
                door,
                responses.parts,
                messages,
                admin,
                guard,
                dashboard,
                traces,
                storage.routers,
            )
        )
        counts = ConnectionCounts(room_for_connections(settings.max_connections), settings.max_connections_per_address)
        server = make_server(app, counts, metrics.refused, drain_timeout_s=max(1.0, settings.drain_timeout_s - 1.0))
        service.spawn(streams.run(), "streams")
        service.spawn(models.follow(bus, lambda card: load_encoder(card, templates.learn)), "models")
        service.spawn(watch.run(), "queue-watch")
        service.spawn(accounts.run(), "accounts")
        service.spawn(attachments.run(), "attachments")
        service.spawn(storage.runner.run(), "batches")
        service.spawn(service.report(bus, lambda: service.not_ready() or "ready", gauges), "telemetry")
        service.set_ready(not_ready)
        # Who is let in earlier would be told that there is no such model. Connections wait at the listener.
        await models.first_read(FIRST_READ_S)
        service.spawn(responses.run(), "background-responses")
        serving = asyncio.create_task(server.serve([listener]), name="web-server")
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port)
        leaving = asyncio.create_task(_leave_batches(service, storage.runner), name="leaving-batches")
        try:
            await self._until_done(service, server, serving, table)
        finally:
            if not service.draining.is_set():
                leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await storage.runner.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await responses.close()
            await unattended.close()
            await canceller.close()
            await table.close()
            await accounts.close()
            pool.close()
            await templates.close()
            await grammars.close()

    async def _until_done(
        self, service: Service, server: WebServer, serving: "asyncio.Task[None]", table: InFlightTable
    ) -> None:
        draining = asyncio.create_task(service.draining.wait(), name="draining")
        try:
            await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
        if not serving.done():
            # /health has turned; balancers get a moment to see it before the door closes.
            await asyncio.sleep(self._settings.drain_delay_s)
            server.should_exit = True
            patience_s = self._settings.drain_timeout_s - self._settings.drain_delay_s - CUT_S
            await asyncio.wait((serving,), timeout=max(0.0, patience_s))
            if not serving.done():
                log.warning("cutting what is still running", num_requests=len(table))
                table.fail_all(Overloaded("The server is shutting down.", retry_after_s=1.0, code="draining"))
        await serving


async def _leave_batches(service: Service, runner: BatchRunner) -> None:
    """At once: others can go on with them while the clients here still get their answers."""
    await service.draining.wait()
    await runner.close()


def _guard(settings: RouterSettings) -> Guard:
    """Raises ConfigError."""
    has_keys = settings.require_keys
    hosts = HostNames(settings.allowed_hosts, listens_on=settings.host, has_keys=has_keys)
    return Guard(hosts, Origins(settings.cors_origins, has_keys=has_keys))


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
