"""The I/O process of a worker: holds the broker connection and the engine process, and connects the two.

    loading -> ready -> draining -> leaving, or parked (`duty.py`)

Ready or parked only after the engine has generated a token. When the engine dies, hangs or talks nonsense, the process
says that it leaves and exits non-zero: its scheduler places the sequences elsewhere, a supervisor starts a new worker.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from headrace_shared import codec, telemetry
from headrace_shared.beats import beat
from headrace_shared.bus import Bus
from headrace_shared.errors import BusError, ConfigError, HeadraceError
from headrace_shared.fleet_messages import Hello, ModelCard, WorkerState
from headrace_shared.messages import DrainVerdict, WorkerId
from headrace_shared.model_cards import served_name
from headrace_shared.service import Service
from headrace_shared.subjects import TOKENS, grants_subject, hello_subject
from headrace_shared.tasks import done_before
from headrace_worker.adapters.keeper import AdapterKeeper
from headrace_worker.card_keeper import CardKeeper
from headrace_worker.commands import Commands
from headrace_worker.duty import Action, Duty
from headrace_worker.engine_frames import (
    AdapterLoaded,
    Iteration,
    Load,
    Loaded,
    Loading,
    Refused,
    Rested,
    TokenizerPart,
)
from headrace_worker.engine_link import AnyLink, EngineDied
from headrace_worker.gpu import GpuWatch, Nvml, own_gpus
from headrace_worker.hang_watch import HangWatch
from headrace_worker.log_watch import LogWatch
from headrace_worker.mirror import Mirror
from headrace_worker.parallel.leader_node import LeaderNode
from headrace_worker.parallel.rank_group import RankGroup
from headrace_worker.parallel.start import start_engine
from headrace_worker.patience import Patience
from headrace_worker.reporting import Reporting
from headrace_worker.session import Session
from headrace_worker.settings import WorkerSettings
from headrace_worker.starvation import Starvation, run_delays
from headrace_worker.stay_metrics import StayMetrics
from headrace_worker.stay_traces import StayTraces
from headrace_worker.stay_watch import StayWatch

TICK_S = 0.05
HELLO_S = 1.0
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
_RETRY_S = 0.5
log = structlog.get_logger(__name__)


class EngineHangs(HeadraceError):
    def __init__(self, seconds: float) -> None:
        super().__init__(f"the engine has finished no iteration for {seconds:.0f} s while it has something to compute")


class WorkerService:
    """One worker process on a connected bus. `run` returns when it has drained."""

    def __init__(
        self,
        service: Service,
        bus: Bus,
        settings: WorkerSettings,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[WorkerSettings], Awaitable[AnyLink]] = start_engine,
    ) -> None:
        """`start`: how an engine on this machine is started."""
        self._start = start
        self._service = service
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._id = WorkerId(service.id)
        self._duty = Duty(self._id, parked=settings.parked, drain_limit_s=settings.drain_limit_s)
        self._commands = Commands(self._id, bus, self._duty, self._carry_out, self._hello, clock)
        self._failure = ""
        """Why it has to leave."""
        self._model = settings.served_name or served_name(settings.model)
        self._facts: Loaded | None = None
        self._session: Session | None = None
        self._loading: Loading | None = None
        self._patience = Patience(settings.hang_timeout_s)
        self._pids: Sequence[int] = ()
        """Of the engine."""
        self._hang_watch = HangWatch(self._patience, Starvation(lambda: run_delays(self._pids)), clock())
        self._is_done = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._reporting: Reporting | None = None
        self._keeper: AdapterKeeper | None = None
        self._cards: CardKeeper | None = None
        self._log_made_at: float | None = None
        """When the broker made the token log that we know."""

    async def run(self) -> None:
        """Raises ConfigError if the engine cannot serve what is configured, EngineDied, RankLost or EngineHangs if it
        fails."""
        await self._commands.listen()
        self._service.spawn(self._say_hello(), "hello")
        self._service.spawn(
            self._service.report(self._bus, lambda: self._duty.state.value, self._gauges, self._model), "telemetry"
        )
        if self._settings.num_nodes == 1:
            await self._run_engine(await self._start(self._settings))
            return
        async with LeaderNode(self._service, self._bus, self._settings, lambda: self._failure) as node:
            if await self._unless_draining(node.assemble()):
                await self._run_engine(await node.start_ranks())

    async def _run_engine(self, link: AnyLink) -> None:
        log.info("engine started", pid=link.pid)
        try:
            if await self._unless_draining(self._prepare(link)):
                await self._serve(link)
        finally:
            self._commands.act(lambda duty, _: duty.on_leaving())
            await link.close()

    async def _prepare(self, link: AnyLink) -> None:
        self._cards = CardKeeper(self._bus, await self._load(link))
        await self._cards.store()
        await self._find_log()

    async def _unless_draining(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` came to its end before the process was told to stop."""
        return await done_before(self._service.draining, asyncio.create_task(work))

    async def _load(self, link: AnyLink) -> ModelCard:
        link.send(Load(config=self._settings.engine_config()))
        tokenizer = bytearray()
        stage_since = self._clock()
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                while True:
                    frame = await link.read()
                    if isinstance(frame, Loading):
                        if self._loading is None or self._loading.stage != frame.stage:
                            log.info("loading", stage=frame.stage)
                            stage_since = self._clock()
                        self._loading = frame
                    elif isinstance(frame, TokenizerPart):
                        tokenizer += frame.data
                        if len(tokenizer) > MAX_TOKENIZER_BYTES:
                            raise ConfigError("model", f"its tokenizer exceeds {MAX_TOKENIZER_BYTES} bytes")
                    elif isinstance(frame, Refused):
                        raise ConfigError(frame.key, frame.problem)
                    elif isinstance(frame, Loaded):
                        self._facts = frame
                        self._model = frame.card.model
                        if frame.device == "cpu":  # others compile their kernels meanwhile
                            self._patience.note(self._clock() - stage_since)
                        return replace(frame.card, tokenizer=bytes(tokenizer))
        except TimeoutError as error:
            raise EngineHangs(self._settings.load_timeout_s) from error

    async def _serve(self, link: AnyLink) -> None:
        assert self._facts is not None and self._cards is not None, "served before it was loaded"
        is_in_cluster = self._settings.nats_replicas > 1
        mirror = Mirror(self._facts.block_size, keeps_finished=is_in_cluster)
        session = Session(
            self._id,
            self._bus,
            mirror,
            link.send_bytes,
            self._on_adopted,
            self._clock(),
            self._on_verdict,
            self._watch(mirror, self._facts),
        )
        self._session = session
        self._pids = link.pids
        memory = link.memory if isinstance(link, RankGroup) else dict
        gpus = self._watch_gpus(self._facts)
        self._reporting = Reporting(self._service.metrics, self._facts, session, self._clock, memory, gpus.gauges)
        subscription = await self._bus.subscribe(
            grants_subject(self._id), lambda message: self._guard(lambda: session.on_control(message, self._clock()))
        )
        self._bus.on_reconnect(self._reconnected.set)
        keeper = AdapterKeeper(self._bus, self._settings, link.send, self._hello, self._clock)
        self._keeper = keeper
        tasks = [self._service.spawn(self._told(self._read(link, session)), "engine")]
        try:
            if not await self._unless_draining(keeper.start(self._model)):
                return
            self._service.set_ready(lambda: None if self._bus.is_connected else "no connection to the broker")
            self._commands.act(Duty.on_loaded)
            log.info("loaded", model=self._model, num_blocks=self._facts.num_blocks, device=self._facts.device)
            tasks += [
                self._service.spawn(self._told(self._tick(session)), "tick"),
                self._service.spawn(self._resume(session), "resume"),
                self._service.spawn(self._await_signal(), "signal"),
                self._service.spawn(keeper.run(), "adapters"),
                self._service.spawn(self._cards.run(), "model-card"),
            ]
            if self._facts.device.startswith("cuda"):
                tasks.append(self._service.spawn(gpus.run(), "gpus"))
            if is_in_cluster:
                tasks.append(self._service.spawn(LogWatch(self._bus, session).run(), "log-watch"))
            await self._is_done.wait()
        finally:
            for task in tasks:
                task.cancel()
            await subscription.close()

    def _watch_gpus(self, facts: Loaded) -> GpuWatch:
        settings = self._settings
        num_ranks = settings.tensor_parallel * settings.pipeline_parallel // settings.num_nodes
        gpus = own_gpus(facts.device, num_ranks, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return GpuWatch(self._service.metrics, lambda: Nvml.open(gpus))

    def _watch(self, mirror: Mirror, facts: Loaded) -> StayWatch:
        tracing = self._service.tracing
        traces = StayTraces(tracing, self._id) if tracing is not None else None
        return StayWatch(StayMetrics(self._service.metrics, facts.card.model), traces, mirror.num_tokens_of)

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever ends `work` is told to schedulers: it may be the fault of what was running."""
        try:
            await work
        except Exception as error:
            self._failure = str(error) or type(error).__name__
            raise

    async def _read(self, link: AnyLink, session: Session) -> None:
        while True:
            frame = await link.read()
            if isinstance(frame, Iteration):
                self._patience.note(frame.elapsed_s)
                session.on_iteration(frame, self._clock())
                if session.has_more:
                    await asyncio.sleep(0)  # the connection writes what it was given in this turn
                    session.publish(self._clock())
            elif isinstance(frame, AdapterLoaded) and self._keeper is not None:
                self._keeper.on_loaded(frame)
            elif isinstance(frame, Rested) and frame.generation == session.generation:
                self._commands.act(Duty.on_rested)

    async def _resume(self, session: Session) -> None:
        """After each reconnect: a restarted broker has lost the token log, which is to hold what is sent again."""
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            self._hello()  # nobody takes a lease of a worker that was silent
            is_log_lost = await self._find_log()
            session.on_reconnect(self._clock(), is_log_lost=is_log_lost)

    async def _find_log(self) -> bool:
        """Waits until there is a token log. Whether it is another one than that we knew, if we did."""
        while True:
            try:
                await self._bus.ensure_stream(TOKENS)
                before, self._log_made_at = self._log_made_at, await self._bus.made_at(TOKENS.name)
                return before is not None and before != self._log_made_at
            except BusError as error:
                log.info("no token log yet", error=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _tick(self, session: Session) -> None:
        while True:
            now = self._clock()
            session.tick(now)
            self._commands.act(lambda duty, now: duty.tick(now, is_empty=session.is_empty))
            if not session.mirror.can_run and not self._duty.is_resting:
                session.iterated_at = now
            if self._hang_watch.hangs(session.iterated_at, now):
                raise EngineHangs(now - session.iterated_at)
            await beat(TICK_S)

    def _guard(self, call: Callable[[], None]) -> None:
        """Runs `call` in a bus callback, where an engine that stopped reading must end the service, not the bus."""
        try:
            call()
        except EngineDied as error:
            self._failure = str(error)
            self._service.fail(self._failure)

    async def _await_signal(self) -> None:
        await self._service.draining.wait()
        self._commands.act(Duty.on_signal)

    def _carry_out(self, action: Action) -> None:
        if action is Action.LEAVE:
            self._is_done.set()
            if self._session is None and not self._service.draining.is_set():
                self._service.drain()  # loading is not waited for
        elif self._session is not None:
            if action is Action.REST:
                self._guard(self._session.suspend)
            else:
                self._session.resume()

    def _on_adopted(self) -> None:
        self._commands.on_adopted()
        self._hello()

    def _on_verdict(self, verdict: DrainVerdict) -> None:
        self._commands.act(lambda duty, now: duty.on_verdict(verdict, now))

    async def _say_hello(self) -> None:
        while True:
            self._hello()
            await beat(HELLO_S)

    def _hello(self) -> None:
        facts = self._facts
        hello = Hello(
            worker=self._id,
            model=self._model,
            state=self._duty.state,
            epoch=self._session.epoch if self._session is not None else 0,
            num_blocks=facts.num_blocks if facts is not None else 0,
            block_size=facts.block_size if facts is not None else 0,
            context=facts.context if facts is not None else 0,
            max_sequences=facts.max_sequences if facts is not None else 0,
            tokens_per_iteration=facts.tokens_per_iteration if facts is not None else 0,
            failure=self._failure if self._duty.state is WorkerState.LEAVING else "",
            hang_timeout_s=self._hang_watch.told_limit_s,
            promotion_s=self._commands.promotion_s,
            is_parking=self._duty.is_parking,
            command_epoch=self._duty.epoch,
            adapters=self._keeper.states if self._keeper is not None else (),
            device=facts.device if facts is not None else "",
            dtype=facts.dtype if facts is not None else "",
        )
        with contextlib.suppress(BusError):  # the next one is soon
            self._bus.publish(hello_subject(self._model, self._id), codec.encode(hello))

    def _gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        if self._loading is not None and self._session is None:
            gauges[telemetry.LOADING_CURRENT] = self._loading.current
            gauges[telemetry.LOADING_TOTAL] = self._loading.total
        return self._reporting.gauges() if self._reporting is not None else gauges
