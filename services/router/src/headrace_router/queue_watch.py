"""The router's view of all queues: hears workers, autoscaler and other routers, and refreshes the forecasts."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from headrace_router.arrivals import Arrivals
from headrace_router.capacities import Capacities
from headrace_router.forecast import Estimate
from headrace_router.model_queue import ModelQueue, Observed, Place
from headrace_router.own_requests import Shed
from headrace_router.peer_loads import is_plausible
from headrace_router.promises import Promises, pack, pack_kept, unpack, unpack_kept
from headrace_router.prompt import Prompt
from headrace_router.prompt_size import PromptSize
from headrace_shared import telemetry
from headrace_shared.backlog import lane_depths
from headrace_shared.beats import beat
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode, encode
from headrace_shared.errors import BusError, Overloaded, ProtocolError
from headrace_shared.figures import read_figures
from headrace_shared.fleet_messages import RouterLoad
from headrace_shared.messages import Request, RouterId
from headrace_shared.subjects import ALL_LOADS, loads_subject, telemetry_subject

PERIOD_S = 0.25
MAX_SHARE = 0.1
"""Of this process's time at most is spent on forecasts."""
DEPTH_PERIOD_S = 1.0
LOAD_GROUPS = 32
"""Of waiting and of running requests, for the other routers."""
ACTIVE_S = 10.0
"""A queue that nobody has asked for in this time is not looked at."""
MAX_QUEUES = 1000
MAX_NEW_PROMISES = 4000
DEFAULT_TOKENS_PER_CHAR = 0.25
LEARNING = 0.05

log = structlog.get_logger(__name__)


class Tracker(Protocol):
    """Is told what becomes of requests."""

    def queued(self, prompt: Prompt, shed: Shed) -> None: ...

    def started(self, prompt: Prompt) -> None: ...

    def closed(self, prompt: Prompt) -> None: ...

    def place(self, request: Request, sequence: int, num_prompt_tokens: int) -> Place: ...


class QueueWatch:
    """`run` is its task."""

    def __init__(
        self,
        bus: Bus,
        router: RouterId,
        capacities: Capacities,
        promises: Promises,
        on_observed: Callable[[str, Observed, float], None] = lambda model, observed, factor: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_observed` gets model, prediction and result, and the correction in use."""
        self._bus = bus
        self._router = router
        self._capacities = capacities
        self._promises = promises
        self._on_observed = on_observed
        self._clock = clock
        self._arrivals = Arrivals()
        self._queues: dict[str, ModelQueue] = {}
        self._tokens_per_char: dict[str, float] = {}
        self._new_promises: dict[str, list[bytes]] = {}
        self._kept_promises: list[bytes] = []
        self._has_told: set[str] = set()
        self._num_own_told = 0
        self.retry_after_s: Callable[[float], float] = lambda wait_s: 5.0
        """What a client is told whose request is given up in the queue, where a later one would be in time then."""

    async def open(self) -> None:
        """Raises BusError."""
        for service in ("worker", "autoscaler"):
            await self._bus.subscribe(telemetry_subject(service, "*"), self._on_telemetry)
        await self._bus.subscribe(ALL_LOADS, self._on_load)
        self._bus.on_reconnect(self._on_reconnect)

    def queue(self, model: str) -> ModelQueue:
        queue = self._queues.get(model)
        if queue is None:
            if len(self._queues) >= MAX_QUEUES:
                del self._queues[min(self._queues, key=self._use_of)]
            queue = self._queues[model] = ModelQueue(self._router, model, self._arrivals)
        return queue

    @property
    def models(self) -> list[str]:
        """Whose queues are looked at."""
        return sorted(self._queues)

    @property
    def newest_sequence(self) -> int:
        """The highest of the stream that was heard of."""
        return self._arrivals.newest

    def _use_of(self, model: str) -> tuple[int, float]:
        queue = self._queues[model]
        return len(queue.own), queue.touched_at

    # Questions.

    def num_tokens(self, model: str, size: PromptSize) -> int:
        """Of all prompts of a call, about, before they are tokenized."""
        return size.num_tokens(1.0 / self._tokens_per_char.get(model, DEFAULT_TOKENS_PER_CHAR))

    def estimate(
        self, model: str, num_tokens: int, num_choices: int, max_tokens: int, rank: int, flow: str, weight: float
    ) -> Estimate | None:
        """Of a call with so many prompt tokens that comes now; None if nobody can tell."""
        if not self._bus.is_connected:
            return None
        now = self._clock()
        queue = self.queue(model)
        queue.touched_at = now
        if now - queue.made_at > (2 * PERIOD_S if queue.forecast is None else ACTIVE_S / 2):
            self._refresh(model, queue, now)
        return queue.estimate(num_tokens, num_choices, max_tokens, rank, flow, weight, now)

    def place(self, request: Request, sequence: int, num_prompt_tokens: int) -> Place:
        now = self._clock()
        queue = self.queue(request.model)
        queue.touched_at = now
        if now - queue.made_at > ACTIVE_S / 2:
            self._refresh(request.model, queue, now)
        return queue.place(request, sequence, num_prompt_tokens, now)

    # What happens to our own requests.

    def queued(self, prompt: Prompt, shed: Shed) -> None:
        now = self._clock()
        queue = self.queue(prompt.request.model)
        queue.touched_at = now
        queue.queued(prompt, now, shed)

    def started(self, prompt: Prompt) -> None:
        model = prompt.request.model
        queue = self.queue(model)
        observed = queue.started(prompt.request.request_id, self._clock())
        if observed is not None:
            self._on_observed(model, observed, queue.calibration.factor)

    def closed(self, prompt: Prompt) -> None:
        self.queue(prompt.request.model).own.remove(prompt.request.request_id)

    def tokenized(self, model: str, size: PromptSize, num_tokens: int) -> None:
        """So many were in texts of this size."""
        if size.num_chars > 0 and num_tokens > size.num_ids:
            before = self._tokens_per_char.get(model, DEFAULT_TOKENS_PER_CHAR)
            seen = (num_tokens - size.num_ids) / size.num_chars
            self._tokens_per_char[model] = before + LEARNING * (min(4.0, seen) - before)

    def promised(self, model: str, digest: bytes, due_in_s: float) -> None:
        """The other routers are to know of it."""
        promises = self._new_promises.setdefault(model, [])
        if len(promises) < MAX_NEW_PROMISES:
            promises.append(pack(digest, due_in_s))

    def kept(self, digest: bytes) -> None:
        """The client has come back."""
        if len(self._kept_promises) < MAX_NEW_PROMISES:
            self._kept_promises.append(digest)

    # The tasks.

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_fresh(), name="forecasts")
            group.create_task(self._keep_depths(), name="queue-depths")

    def gauges(self) -> dict[str, float]:
        """For Telemetry."""
        now = self._clock()
        figures: dict[str, float] = {}
        for model, queue in self._queues.items():
            ttft_s = queue.own.ttft_p95_s(now)
            if ttft_s is not None:
                figures[telemetry.of_model(telemetry.TTFT_P95_OF, model)] = ttft_s
            if len(queue.own):
                tokens = sum(own.prompt.num_tokens for own in queue.own.waiting())
                figures[telemetry.of_model(telemetry.WAITING_TOKENS_OF, model)] = float(tokens)
        return figures

    async def _keep_fresh(self) -> None:
        while True:
            spent_s = 0.0
            for model, queue in list(self._queues.items()):
                began = time.thread_time()
                now = self._clock()
                if self._is_active(queue, now):
                    self._refresh(model, queue, now)
                    spent_s += time.thread_time() - began
                    await asyncio.sleep(0)  # what others do then is not counted
            began = time.thread_time()
            self._tell()
            spent_s += time.thread_time() - began
            if spent_s <= MAX_SHARE * PERIOD_S:
                await beat(PERIOD_S)
            else:
                await asyncio.sleep(spent_s / MAX_SHARE)

    async def _keep_depths(self) -> None:
        while True:
            await beat(DEPTH_PERIOD_S)
            for model, queue in list(self._queues.items()):
                if self._is_active(queue, self._clock()):
                    try:
                        queue.on_depth(await self._depth(model))
                    except BusError as error:
                        log.debug("queue depth unknown", model=model, error=str(error))

    async def _depth(self, model: str) -> int:
        depths = await lane_depths(self._bus, model)
        return sum(depth.num_pending + depth.num_unacknowledged for depth in depths.values())

    def _is_active(self, queue: ModelQueue, now: float) -> bool:
        return len(queue.own) > 0 or now - queue.touched_at <= ACTIVE_S

    def _refresh(self, model: str, queue: ModelQueue, now: float) -> None:
        snapshot = queue.refresh(lambda mix: self._capacities.of(model, mix, now), now)
        # Without a worker, and without the broker, nobody knows when it goes on; and nothing is computed in vain.
        if not self._bus.is_connected or not self._capacities.num_ready(model, now):
            return
        for own in queue.hopeless(snapshot, now):
            log.info("request given up in the queue", request_id=own.prompt.request.request_id)
            own.shed(
                Overloaded(
                    "The queue moves too slowly for the request's deadline.",
                    retry_after_s=self.retry_after_s(queue.room_in_s(own)),
                    code="deadline_unreachable",
                )
            )

    def _tell(self) -> None:
        self._promises.settle(self._clock())
        promises, self._new_promises = self._new_promises, {}
        kept, self._kept_promises = pack_kept(self._kept_promises), []
        newest, num_own = self._arrivals.newest, self._arrivals.num_own
        telling = {model for model, queue in self._queues.items() if len(queue.own)}
        for model in telling | self._has_told | promises.keys():
            load = self.queue(model).load(LOAD_GROUPS, b"".join(promises.get(model, ())))
            self._num_own_told = num_own
            with contextlib.suppress(BusError):  # the next one is soon
                self._bus.publish(loads_subject(self._router), encode(load))
        # Others are to know the numbers of those too that came and went in between.
        if kept or num_own != self._num_own_told:
            self._num_own_told = num_own
            rest = RouterLoad(router=self._router, model="", newest_sequence=newest, kept_promises=kept)
            with contextlib.suppress(BusError):
                self._bus.publish(loads_subject(self._router), encode(rest))
        self._has_told = telling

    def _on_reconnect(self) -> None:
        self._capacities.on_reconnect(self._clock())
        self._arrivals.forget()

    def _on_telemetry(self, message: Message) -> None:
        try:
            self._capacities.on_figures(read_figures(message.data), self._clock())
        except ProtocolError as error:
            log.info("undecodable telemetry", subject=message.subject, error=str(error))

    def _on_load(self, message: Message) -> None:
        try:
            load = decode(message.data, RouterLoad)
        except ProtocolError as error:
            log.warning("undecodable load of a router", error=str(error))
            return
        if load.router == self._router:
            return
        if not is_plausible(load):
            log.warning("implausible load of a router", router=load.router)
            return
        now = self._clock()
        for digest in unpack_kept(load.kept_promises):
            self._promises.keep(digest, now)
        self._arrivals.hear(load.newest_sequence)
        if load.model:
            self.queue(load.model).on_load(load, now)
            for digest, due_in_s in unpack(load.promises):
                self._promises.add(load.model, digest, now + due_in_s, now)
