"""The models that can be asked for, and how many workers are ready.

Cards outlive workers, so a model that is scaled to zero is still known: requests for it wait in the queue.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import structlog

from headrace_router.adapters import AdapterTable
from headrace_router.admission import retry_after
from headrace_router.capacities import Capacities
from headrace_router.tokenization import TextEncoder
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import ModelNotFound, Overloaded, ProtocolError
from headrace_shared.fleet_messages import Hello, ModelCard
from headrace_shared.messages import Request
from headrace_shared.model_cards import watch_cards
from headrace_shared.subjects import ADAPTERS, ALL_HELLOS
from headrace_shared.telemetry import WANTED_OF, of_model

Build = Callable[[ModelCard], Awaitable[TextEncoder]]
"""Raises ProtocolError if the card cannot be used. Reading a tokenizer takes up to seconds."""

log = structlog.get_logger(__name__)

MAX_MODELS = 1000
MAX_HELD = 1000
"""Calls that wait for a model that nobody has shown us yet."""
MAX_HOLD_S = 120.0
WANTED_S = 30.0
"""A call that was refused for want of workers is demand for so long."""


class AdapterRef(NamedTuple):
    """A LoRA adapter, as a request carries it."""

    name: str
    digest: str


class ServedModel(NamedTuple):
    card: ModelCard
    """Of the model itself, whose queue and workers these are."""
    encoder: TextEncoder
    adapter: AdapterRef | None = None

    @property
    def name(self) -> str:
        """As clients ask for it."""
        return self.card.model if self.adapter is None else self.adapter.name


class Models:
    def __init__(self, now: Callable[[], float], capacities: Capacities) -> None:
        """`now` is a monotonic clock, in seconds."""
        self._now = now
        self._capacities = capacities
        self.adapters = AdapterTable()
        self._has_hello = asyncio.Event()
        self._models: dict[str, ServedModel] = {}
        self._new_cards: dict[str, ModelCard] = {}
        self._has_new = asyncio.Event()
        self._is_current = False
        self._was_read = asyncio.Event()
        self._is_known = asyncio.Condition()
        self._wanted: dict[str, int] = {}
        self._missed_at: dict[str, float] = {}

    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound, or Overloaded while no model is known yet."""
        model = self.known(name)
        if model is None:
            if not self._models and not self.can_wake:
                raise Overloaded("No model is ready yet.", retry_after_s=retry_after(2.0), code="no_model")
            raise ModelNotFound(name[:256])
        return model

    def known(self, name: str) -> ServedModel | None:
        """A model, or one with an adapter. A model goes before an adapter of its name."""
        model = self._models.get(name)
        if model is None and (record := self.adapters.find(name)) is not None:
            base = self._models.get(record.model)
            return None if base is None else base._replace(adapter=AdapterRef(name, record.digest))
        return model

    def asked_by(self, request: Request) -> ServedModel:
        """As it was when the request was made. Raises ModelNotFound, or Overloaded."""
        model = self.get(request.model)
        if not request.adapter:
            return model
        return model._replace(adapter=AdapterRef(request.adapter, request.adapter_digest))

    def knows(self, name: str) -> bool:
        """There is one of this name, or one that could be started."""
        return self.known(name) is not None or name in self.startable()

    async def find(self, name: str, patience_s: float) -> ServedModel:
        """As `get`; waits for the card of a model that an autoscaler can start and that has had no worker yet."""
        if name in self._models or not self._capacities.can_wake(name, self._now()):
            return self.get(name)
        start_s = self._capacities.start_s(name, self._now())
        starting = Overloaded("The model is being started.", retry_after_s=retry_after(start_s), code="model_starting")
        if sum(self._wanted.values()) >= MAX_HELD:
            raise starting
        self._wanted[name] = self._wanted.get(name, 0) + 1
        try:
            async with asyncio.timeout(min(patience_s, MAX_HOLD_S)), self._is_known:
                await self._is_known.wait_for(lambda: name in self._models)
        except TimeoutError:
            raise starting from None
        finally:
            self._wanted[name] -= 1
            if not self._wanted[name]:
                del self._wanted[name]
        return self.get(name)

    def all(self) -> list[ServedModel]:
        """Without adapters."""
        return [self._models[name] for name in sorted(self._models)]

    def with_adapters(self) -> list[ServedModel]:
        """One for each adapter of a model that is known."""
        found = [self.known(record.name) for record in self.adapters.all()]
        return [model for model in found if model is not None and model.adapter is not None]

    def startable(self) -> list[str]:
        """Models that an autoscaler can start, and of which there is no card yet."""
        return [name for name in self._capacities.wakeable(self._now()) if name not in self._models]

    def num_ready_workers(self) -> int:
        """Of models that can be asked for: a worker may be heard of before its card is read."""
        return sum(self._capacities.num_ready(model, self._now()) for model in self._models)

    @property
    def can_wake(self) -> bool:
        """There is a model whose workers would be started."""
        return bool(self._capacities.wakeable(self._now()))

    def miss(self, name: str) -> None:
        """A call was refused that a worker would have served, had there been one. `name` of a model that is known."""
        self._missed_at[name] = self._now()

    def wanted(self) -> dict[str, float]:
        """Figures for Telemetry: what does not stand in the queue and yet is demand."""
        oldest = self._now() - WANTED_S
        self._missed_at = {name: at for name, at in self._missed_at.items() if at > oldest}
        numbers = {**dict.fromkeys(self._missed_at, 1), **self._wanted}
        return {of_model(WANTED_OF, name): float(number) for name, number in numbers.items()}

    async def follow(self, bus: Bus, build: Build) -> None:
        """Keeps up with cards and workers until cancelled."""
        hellos = await bus.subscribe(ALL_HELLOS, self._on_hello)
        try:
            await bus.ensure_bucket(ADAPTERS)
            adapters = await bus.watch(ADAPTERS.name, self.adapters.on_change)
            cards = await watch_cards(bus, self._on_card, self._on_cards_read)
            try:
                while True:
                    await self._has_new.wait()
                    self._has_new.clear()
                    await self._build_new(build)
                    if self._is_current:
                        self._was_read.set()
            finally:
                await cards.close()
                await adapters.close()
        finally:
            await hellos.close()

    async def first_read(self, timeout_s: float) -> None:
        """Returns when every card that was in the broker at the start is known, at the latest after the timeout."""
        try:
            await asyncio.wait_for(self._was_read.wait(), timeout_s)
        except TimeoutError:
            log.warning("not all model cards could be read yet")

    def add(self, card: ModelCard, encoder: TextEncoder) -> None:
        self._models[card.model] = ServedModel(card, encoder)

    def _on_card(self, card: ModelCard) -> None:
        if card.model in self._models or len(self._models) + len(self._new_cards) < MAX_MODELS:
            self._new_cards[card.model] = card
            self._has_new.set()

    def _on_cards_read(self) -> None:
        self._is_current = True
        self._has_new.set()

    async def _build_new(self, build: Build) -> None:
        while self._new_cards:
            name = next(iter(self._new_cards))
            card = self._new_cards.pop(name)
            try:
                encoder = await build(card)
            except ProtocolError as error:
                log.error("model cannot be served", model=name, error=str(error))
                continue
            self.add(card, encoder)
            async with self._is_known:
                self._is_known.notify_all()
            log.info("model known", model=name, context=card.context, vocab_size=card.vocab_size)

    async def next_hello(self, timeout_s: float) -> None:
        """Returns when a worker has said something, at the latest after the timeout."""
        self._has_hello.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_hello.wait(), timeout_s)

    def _on_hello(self, message: Message) -> None:
        try:
            hello = decode(message.data, Hello)
        except ProtocolError as error:
            log.warning("undecodable hello", error=str(error))
            return
        self._capacities.on_hello(hello, self._now())
        self.adapters.on_hello(hello, self._now())
        self._has_hello.set()
