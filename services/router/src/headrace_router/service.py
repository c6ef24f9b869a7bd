"""The router's shell: connects the parts, serves, drains."""

import asyncio
import contextlib
import socket

import structlog

from headrace_router.adapter_admin import AdapterAdmin
from headrace_router.app import make_app
from headrace_router.authentication import Door
from headrace_router.batches.assembly import open_storage
from headrace_router.batches.endpoints import batch_endpoints
from headrace_router.batches.runner import BatchRunner
from headrace_router.bodies import BodyLimits, ByteBudget
from headrace_router.browser_guard import Guard, Origins
from headrace_router.call_response import ClientLimits
from headrace_router.call_trace import CallTraces
from headrace_router.calling import Calling
from headrace_router.connection_counts import ConnectionCounts
from headrace_router.dashboard.assembly import start_dashboard
from headrace_router.host_names import HostNames
from headrace_router.inflight import InFlightTable
from headrace_router.messages_api.service import MessagesService
from headrace_router.responses_api.responses import Responses
from headrace_router.routes import Parts
from headrace_router.settings import RouterSettings
from headrace_router.web_server import WebServer, listen, make_server, room_for_connections
from headrace_shared.bus import Bus
from headrace_shared.errors import Overloaded
from headrace_shared.service import Service
from headrace_shared.service_bus import service_bus

log = structlog.get_logger(__name__)

FIRST_READ_S = 5.0
"""The most that the door stays shut at the start for cards to be read."""
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
        calling = Calling(service, bus, settings)
        await calling.open()
        caller, models, metrics = calling.caller, calling.models, calling.metrics
        responses = Responses(
            bus,
            calling.router,
            caller,
            calling.preparer,
            models,
            calling.canceller,
            calling.presence,
            metrics,
            settings.ping_interval_s,
        )
        await responses.open()
        endpoints = batch_endpoints(caller, responses.parts.creator.create)
        storage = await open_storage(
            bus, calling.router, caller, endpoints, calling.keys, calling.accounts, metrics, settings
        )
        dashboard = start_dashboard(service, bus, models, metrics.journal) if settings.dashboard else None
        app = make_app(
            Parts(
                caller,
                models,
                calling.preparer,
                metrics,
                _client_limits(settings),
                service.not_ready,
                Door(calling.keys, settings.open_metrics, calling.accounts.headers, has_pages=dashboard is not None),
                responses.parts,
                MessagesService(caller, calling.preparer, models),
                AdapterAdmin(bus, models, models.adapters),
                guard,
                dashboard,
                CallTraces(service.tracing, settings.trace_content) if service.tracing is not None else None,
                storage.routers,
            )
        )
        counts = ConnectionCounts(room_for_connections(settings.max_connections), settings.max_connections_per_address)
        server = make_server(app, counts, metrics.refused, drain_timeout_s=max(1.0, settings.drain_timeout_s - 1.0))
        calling.spawn(service)
        service.spawn(storage.runner.run(), "batches")
        service.spawn(service.report(bus, lambda: service.not_ready() or "ready", calling.gauges), "telemetry")
        service.set_ready(calling.not_ready)
        # Who is let in earlier would be told that there is no such model. Connections wait at the listener.
        await models.first_read(FIRST_READ_S)
        service.spawn(responses.run(), "background-responses")
        serving = asyncio.create_task(server.serve([listener]), name="web-server")
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port)
        leaving = asyncio.create_task(_leave_batches(service, storage.runner), name="leaving-batches")
        try:
            await self._until_done(service, server, serving, calling.table)
        finally:
            if not service.draining.is_set():
                leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await storage.runner.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await responses.close()
            await calling.close()

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


def _client_limits(settings: RouterSettings) -> ClientLimits:
    budget = ByteBudget(settings.max_body_bytes)
    return ClientLimits(BodyLimits(settings.max_body_bytes, settings.body_timeout_s, budget), settings.send_timeout_s)
