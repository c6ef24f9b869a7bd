"""`headrace up`: broker and services as local processes, until Ctrl-C."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import httpx

from headrace_cli.autoscaler_process import AutoscalerProcess
from headrace_cli.broker_process import BrokerProcess
from headrace_cli.display import Display, Row
from headrace_cli.errors import CommandError
from headrace_cli.fleet_view import FleetView
from headrace_cli.leftovers import end_leftovers
from headrace_cli.log_file import LogFile
from headrace_cli.plan import Plan, computes_on_cores, make_plan
from headrace_cli.preflight import check_data_dir, check_memory, check_ports, needed_memory, writing_to
from headrace_cli.probe import base_url
from headrace_cli.process import Process, Supervised
from headrace_cli.readiness import Readiness
from headrace_cli.settings import UpSettings, data_dir_of
from headrace_cli.state_file import (
    InstanceState,
    ProcessState,
    birth_of,
    lock_data_dir,
    readable,
    remove_state,
    write_state,
)
from headrace_cli.supervisor import Supervisor
from headrace_cli.worker_fleet import Refused, WorkerFleet
from headrace_shared.broker import NatsServer
from headrace_shared.broker_config import authorization
from headrace_shared.broker_credentials import ensure_keys, key_path
from headrace_shared.broker_permissions import Role
from headrace_shared.errors import BusError, ConfigError
from headrace_shared.fleet_messages import Hello
from headrace_shared.logs import configure_logging
from headrace_shared.machine import available_memory, num_cores, num_gpus
from headrace_shared.messages import WorkerId
from headrace_shared.model_cards import clear_cards
from headrace_shared.nats_bus import NatsBus
from headrace_shared.telemetry import HEALTH_PORT
from headrace_shared.turns import give_way

STOP_ORDER = ("router", "scheduler", "worker", "autoscaler", "nats")
"""Routers drain first, while everything behind them still works."""
VIEW_PERIOD_S = 0.25
BROKER_URL_FILE = "broker-url"
CREDENTIALS_FOLDER = "credentials"
_DEVICES = {"cpu": "cpu", "cuda": "cuda", "timing": "simulated"}
_FLOATS = {"float32": "32-bit floats", "bfloat16": "16-bit floats", "float16": "16-bit floats"}


async def run_up(settings: UpSettings, environ: Mapping[str, str], display: Display, config: str) -> None:
    """Runs an instance until SIGINT, SIGTERM or (unless it is ignored) SIGHUP. Raises CommandError; leaves no process
    behind either way."""
    if computes_on_cores(settings, environ, num_gpus()):
        give_way()
    data_dir = data_dir_of(settings.data_dir, settings.port, environ)
    await end_leftovers(data_dir, display.say)
    check_ports(settings.host, range(settings.port, settings.port + settings.routers))
    check_data_dir(data_dir)
    num_others = settings.routers + settings.schedulers * len(settings.models) + int(settings.autoscaler) + 1
    kv_cache_bytes = 0 if settings.device.startswith("cuda") or settings.num_blocks else settings.kv_cache_bytes
    num_ranks = settings.num_workers * settings.num_ranks
    if settings.sim:
        num_ranks, num_others = 0, num_others + settings.num_workers
    check_memory(needed_memory(num_ranks, num_others, kv_cache_bytes // settings.num_ranks), available_memory())
    with lock_data_dir(data_dir):
        logs = data_dir / "logs"
        log = LogFile(logs / "up.log")
        with writing_to(data_dir):
            logs.mkdir(exist_ok=True)
            descriptor = log.open()
        with os.fdopen(descriptor, "w") as stream:
            log.trim()
            configure_logging("up", f"up-{os.getpid()}", "warning", "json", stream)
            await _Instance(settings, environ, display, config, data_dir).run()


class _Instance:
    def __init__(
        self, settings: UpSettings, environ: Mapping[str, str], display: Display, config: str, data_dir: Path
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._display = display
        self._config = config
        self._data_dir = data_dir
        self._url = base_url(settings.host, settings.port)
        self._view = FleetView()
        self._supervisor = Supervisor(self._view.was_ready, display.say)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._state = "starting"
        self._is_showing = True
        self._birth = birth_of(os.getpid())
        self._written_state: InstanceState | None = None
        self._fleet: WorkerFleet | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup headrace up` is to outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)
        background = [
            asyncio.create_task(self._supervisor.trim_logs(), name="trim-logs"),
            asyncio.create_task(self._refresh(), name="refresh"),
        ]
        try:
            await self._until_stopped(self._run_services())
        finally:
            self._is_showing = False
            self._display.close()
            self._state = "stopping"
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            if self._stop.is_set():
                self._display.say("Stopping; press Ctrl-C again to stop at once.")
            self._write_state()
            if self._fleet is not None:
                self._fleet.close()
            await self._supervisor.stop(STOP_ORDER, self._settings.drain_timeout_s, self._hurry)
            remove_state(self._data_dir)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` until a signal comes. Raises its error, or CommandError if the instance fails."""
        tasks = [asyncio.create_task(each) for each in (work, self._stop.wait(), self._supervisor.failure())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (tasks[2], tasks[0]):
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_services(self) -> None:
        settings = self._settings
        credentials = self._data_dir / CREDENTIALS_FOLDER
        try:
            # New ones at each start: nobody else needs them.
            public_keys = await asyncio.to_thread(ensure_keys, credentials, rotate=True)
            access = authorization({role: [key] for role, key in public_keys.items()})
            server = NatsServer(self._data_dir / "broker", access=access, sync_interval=settings.sync_interval)
        except ConfigError as error:
            raise CommandError(str(error)) from error
        self._display.say(f"Data and logs: {self._data_dir}")
        await self._supervisor.start(BrokerProcess(server, self._display.say))
        with writing_to(self._data_dir):
            (self._data_dir / BROKER_URL_FILE).write_text(server.url + "\n")
        plan = make_plan(
            settings,
            self._environ,
            nats_url=server.url,
            credentials=credentials,
            num_cores=num_cores(),
            num_gpus=num_gpus(),
            config=self._config,
        )
        try:
            bus = await NatsBus.connect(
                server.url,
                name="headrace-up",
                on_closed=lambda: None,
                role=Role.OPERATOR,
                credentials=str(key_path(credentials, Role.OPERATOR)),
            )
        except BusError as error:
            raise CommandError(f"the broker does not answer: {error}", f"its log is {server.log_path}") from error
        try:
            try:
                await clear_cards(bus)
                await self._view.start(bus)
            except BusError as error:
                raise CommandError(
                    f"the broker does not do its work: {error}", f"its log is {server.log_path}"
                ) from error
            await self._serve(plan)
        finally:
            await self._view.close()
            await bus.close()

    async def _serve(self, plan: Plan) -> None:
        if self._settings.autoscale:
            await self._start_scaled(plan)
        else:
            for spec in plan.services:
                await self._supervisor.start(Process(spec, self._data_dir / "logs"))
        # What is on this machine is not asked for through a proxy.
        async with httpx.AsyncClient(trust_env=False) as client:
            await Readiness(self._supervisor, self._view, self._settings, client).wait()
        self._supervisor.has_started = True
        self._state = "serving"
        self._show()
        self._is_showing = False
        self._display.close()
        self._write_state()
        self._announce()
        await asyncio.Event().wait()

    async def _start_scaled(self, plan: Plan) -> None:
        """As many workers as are asked for; from then on they are the autoscaler's."""
        logs = self._data_dir / "logs"
        fleet = WorkerFleet(self._supervisor, plan, logs)
        self._fleet = fleet
        for spec in [*plan.routers, *plan.schedulers]:
            await self._supervisor.start(Process(spec, logs))
        for spec in plan.workers[: len(plan.places)]:
            try:
                await fleet.start(spec.model, WorkerId(f"worker-{secrets.token_hex(4)}"), generation=0)
            except Refused as error:
                raise CommandError(str(error)) from error
        for spec in plan.autoscalers:
            await self._supervisor.start(AutoscalerProcess(spec, logs, fleet))

    def _announce(self) -> None:
        settings = self._settings
        say = self._display.say
        for process in self._supervisor.processes:
            hello = self._view.of(process.id).hello
            if process.spec.service == "worker" and hello is not None:
                say(f"{process.spec.name}: {_described(hello)}")
        say(f"Model: {', '.join(model.name for model in settings.models)}")
        if settings.autoscale and self._fleet is not None:
            say(f"Workers come and go with the load: {settings.min_workers} to {self._fleet.max_workers}")
        for index in range(settings.routers):
            url = base_url(settings.host, settings.port + index)
            say(f"API: {url}/v1   schema: {url}/openapi.json   metrics: {url}/metrics")
        say("Application startup complete.")

    async def _refresh(self) -> None:
        """Keeps display and state file up to date."""
        while True:
            if self._is_showing:
                self._show()
            self._write_state()
            await asyncio.sleep(VIEW_PERIOD_S)

    def _show(self) -> None:
        self._display.show([self._row(process) for process in self._supervisor.processes])

    def _row(self, process: Supervised) -> Row:
        return Row(process.spec.name, self._state_of(process), self._view.of(process.id).loading)

    def _state_of(self, process: Supervised) -> str:
        said = self._view.shown_state(process.id)
        return said if process.phase == "running" and said else process.phase

    def _write_state(self) -> None:
        processes = tuple(
            ProcessState(
                service=process.spec.service,
                id=process.id,
                pid=process.pid if process.is_alive else 0,
                state=self._state_of(process),
                model=process.spec.model,
                port=process.port or None,
                health_port=int(self._view.of(process.id).gauges.get(HEALTH_PORT, 0)) or None,
                num_restarts=max(0, process.num_starts - 1),
                log=readable(process.log_path),
                birth=birth_of(process.pid) if process.is_alive else "",
            )
            for process in self._supervisor.processes
        )
        state = InstanceState(
            pid=os.getpid(),
            birth=self._birth,
            state=self._state,
            url=self._url,
            model=", ".join(model.name for model in self._settings.models),
            processes=processes,
        )
        if state == self._written_state:
            return
        with contextlib.suppress(OSError):  # a full disk must not stop what runs; `ps` is then out of date
            write_state(self._data_dir, state)
            self._written_state = state


def _described(worker: Hello) -> str:
    known = _DEVICES.get(worker.device.partition(":")[0]), _FLOATS.get(worker.dtype)
    tokens = worker.num_blocks * worker.block_size
    return ", ".join(
        (
            *filter(None, known),
            f"KV cache for {tokens:,} tokens",
            f"context {worker.context:,}",
            f"at most {worker.max_sequences} sequences at a time",
        )
    )
