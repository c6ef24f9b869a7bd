"""The life of a service process: start, run, drain, stop, exit code.

    sys.exit(run_service(body, name="scheduler", settings=settings))

`body(service)` is the whole service. It connects, starts its loops with `service.spawn`, says `service.set_ready()`,
waits for `service.draining`, finishes what is running and returns. What can end it otherwise:

- SIGTERM, SIGINT or (unless it is ignored) SIGHUP set `draining`; `drain_timeout_s` later, or at a second signal, the
  body is cancelled (exit code 0);
- `service.fail(reason)`, as when the broker's connection closes for good, cancels the body (exit code 1);
- an exception of the body or of a spawned task ends everything (exit code 1; 2 for a ConfigError, told in one line).

A body that ignores its cancellation, or a thread that does not end, is cut off: the process always exits.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from headrace_shared.beats import beat
from headrace_shared.broker_permissions import twins_subject
from headrace_shared.bus import Bus
from headrace_shared.codec import encode
from headrace_shared.common_settings import CommonSettings
from headrace_shared.errors import BusError, ConfigError, HeadraceError
from headrace_shared.fleet_messages import Telemetry
from headrace_shared.health import HealthServer
from headrace_shared.heap import gather_heap, keep_heap, keep_imports
from headrace_shared.logs import configure_logging
from headrace_shared.settings import EXIT_CONFIG
from headrace_shared.subjects import telemetry_subject
from headrace_shared.tasks import end
from headrace_shared.telemetry import ASYNCIO_TASKS, HEALTH_PORT, STARTED_AT, Metrics
from headrace_shared.tracing import Tracing
from headrace_shared.tracing_setup import set_up_tracing
from headrace_shared.twins import TwinWatch

STOP_TIMEOUT_S = 5.0
"""Longest time for clean-up after the body was cancelled."""
TELEMETRY_PERIOD_S = 1.0

log = structlog.get_logger(__name__)


class Service:
    """What a running service needs to know about its own process. Belongs to one event loop."""

    def __init__(self, name: str, service_id: str = "") -> None:
        self.name = name
        self.id = service_id or f"{name}-{secrets.token_hex(4)}"
        self.metrics = Metrics()
        self.tracing: Tracing | None = None
        """None: no collector is configured, and no span is to be built."""
        self.draining = asyncio.Event()
        """Set once the process is to end: take nothing new, finish what is running, return."""
        self.find_trace_id: Callable[[str], str | None] = lambda _: None
        """Of a request, for lines of the log that name one and no trace."""
        self.health_port = 0
        """Where the health endpoint answers; 0: nowhere. A service with a web server of its own sets it."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called by `set_ready`."""
        self._not_ready: Callable[[], str | None] = lambda: "starting"
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._body: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._is_stopping = False
        self._started_at = time.time()

    def set_ready(self, not_ready: Callable[[], str | None] = lambda: None) -> None:
        """From now on the service is ready whenever `not_ready()` is None; else it returns the reason."""
        self.on_ready()
        self._not_ready = not_ready

    def not_ready(self) -> str | None:
        """Why the service can take no work now; None if it can."""
        return "draining" if self.draining.is_set() else self._not_ready()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Starts a task that lives at most as long as the body. If it raises, the service ends."""
        assert self._group is not None, "spawn() before run()"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def fail(self, reason: str) -> None:
        """Ends the process with exit code 1 and without draining."""
        if self._failure is None:
            self._failure = reason
            log.error("service failed", reason=reason)
        self.stop()

    def drain(self) -> None:
        """What SIGTERM does; a second call stops at once."""
        if self.draining.is_set():
            self.stop()
        self.draining.set()

    def stop(self) -> None:
        """Cancels the body."""
        self._is_stopping = True
        self.draining.set()
        if self._body is not None:
            self._body.cancel()

    async def run(self, body: Callable[["Service"], Coroutine[Any, Any, None]], drain_timeout_s: float) -> int:
        """Runs the body to its end; returns the exit code. Exceptions of the body pass through, except after `fail`."""
        loop = asyncio.get_running_loop()
        self.metrics.gauge(ASYNCIO_TASKS).set_function(lambda: len(asyncio.all_tasks(loop)))
        self._body = asyncio.create_task(self._run_body(body), name="body")
        limiter = asyncio.create_task(self._limit_drain(drain_timeout_s), name="drain-limit")
        try:
            await self._body
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
        except Exception:
            # A failure that was declared is logged already, and explains what breaks after it.
            if self._failure is None:
                raise
        finally:
            await end(limiter)
        return 0 if self._failure is None else 1

    async def report(
        self, bus: Bus, state: Callable[[], str], gauges: Callable[[], dict[str, float]], model: str = ""
    ) -> None:
        """Publishes a Telemetry message every second. Fails the service where another one lives under its id. Spawn
        it."""
        twins = TwinWatch(self._started_at, self._give_way)
        is_listening = False
        while True:
            if not is_listening:
                with contextlib.suppress(BusError):
                    await bus.subscribe(twins_subject(self.name, self.id), twins.on_telemetry)
                    is_listening = True
            figures = {HEALTH_PORT: float(self.health_port), STARTED_AT: self._started_at, **gauges()}
            message = Telemetry(service=self.name, id=self.id, state=state(), model=model, gauges=figures)
            with contextlib.suppress(BusError):  # the next second's figures are as good
                for subject in (telemetry_subject(self.name, self.id), twins_subject(self.name, self.id)):
                    bus.publish(subject, encode(message))
            await beat(TELEMETRY_PERIOD_S)

    def _give_way(self) -> None:
        self.fail(f"another {self.name} runs under the id {self.id}: each needs a HEADRACE_SERVICE_ID of its own")

    async def _run_body(self, body: Callable[["Service"], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                try:
                    await body(self)
                finally:
                    self.draining.set()
                    for task in self._tasks:
                        task.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise

    async def _limit_drain(self, timeout_s: float) -> None:
        await self.draining.wait()
        await asyncio.sleep(timeout_s)
        log.warning("drain timed out", timeout_s=timeout_s)
        self.stop()


def run_service(
    body: Callable[[Service], Coroutine[Any, Any, None]],
    *,
    name: str,
    settings: CommonSettings,
    serve_health: bool = True,
) -> int:
    """Runs a service in this process; returns its exit code. A service with a web server of its own needs no
    `serve_health`."""
    keep_imports()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_supervise(body, name, settings, serve_health))
    except ConfigError as error:
        sys.stderr.write(f"headrace-{name}: {' '.join(str(error).split())}\n")
        return EXIT_CONFIG
    except HeadraceError as error:
        log.error("service failed", reason=str(error))
        return 1
    except Exception:  # a bug, or what nobody foresaw: in the log, and not in Python's form on the terminal
        log.exception("service crashed")
        return 1
    finally:
        # The interpreter waits for threads when it exits, for ever if need be.
        _exit_after(STOP_TIMEOUT_S)


def _settle_heap() -> None:
    keep_heap()
    gather_heap()


async def _supervise(
    body: Callable[[Service], Coroutine[Any, Any, None]], name: str, settings: CommonSettings, serve_health: bool
) -> int:
    service = Service(name, settings.service_id)
    service.on_ready = _settle_heap
    configure_logging(
        name,
        service.id,
        settings.log_level,
        settings.log_format,
        find_trace_id=lambda request_id: service.find_trace_id(request_id),
    )
    service.tracing = set_up_tracing(name, service.id, service.metrics, os.environ)
    loop = asyncio.get_running_loop()

    async def limit_stop() -> None:
        await service.draining.wait()
        _exit_after(settings.drain_timeout_s + STOP_TIMEOUT_S)

    def on_signal() -> None:
        log.info("stopping", now=service.draining.is_set())
        if service.draining.is_set():
            _exit_after(STOP_TIMEOUT_S)
        service.drain()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # What was started with nohup outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    health = HealthServer(service.not_ready, service.metrics.render)
    if serve_health:
        try:
            port = await health.start(settings.health_host, settings.health_port)
        except OSError as error:
            reason = f"cannot listen on {settings.health_host}:{settings.health_port}: {error.strerror}"
            raise ConfigError("health_port", reason) from error
        service.health_port = port
        log.info("health endpoint", host=settings.health_host, port=port)
    limiter = asyncio.create_task(limit_stop(), name="stop-limit")
    try:
        return await service.run(body, settings.drain_timeout_s)
    finally:
        limiter.cancel()
        await health.close()
        if service.tracing is not None:
            await service.tracing.close()
        log.info("stopped")


def _exit_after(seconds: float) -> None:
    """Ends the process `seconds` from now, unless it ended by itself."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
