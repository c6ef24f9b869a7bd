"""The models that can be asked for, and how many workers are ready.

Cards outlive workers, so a model that is scaled to zero is still known: requests for it wait in the queue.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from headrace_router.admission import retry_after
from headrace_router.tokenization import TextEncoder
from headrace_shared.bus import Bus, Message
from headrace_shared.codec import decode
from headrace_shared.errors import ModelNotFound, Overloaded, ProtocolError
from headrace_shared.messages import Hello, ModelCard, WorkerId, WorkerState
from headrace_shared.model_cards import watch_cards
from headrace_shared.subjects import ALL_HELLOS

log = structlog.get_logger(__name__)

WORKER_TIMEOUT_S = 3.0
"""A worker not heard of for so long does not count. They say hello every second."""
MAX_WORKERS = 10_000
MAX_MODELS = 1000


class ServedModel(NamedTuple):
    card: ModelCard
    encoder: TextEncoder


class _Worker(NamedTuple):
    model: str
    state: WorkerState
    heard_at: float


class Models:
    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is a monotonic clock, in seconds."""
        self._now = now
        self._models: dict[str, ServedModel] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._new_cards: dict[str, ModelCard] = {}
        self._has_new = asyncio.Event()

    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound, or Overloaded while no model is known yet."""
        model = self._models.get(name)
        if model is None:
            if not self._models:
                raise Overloaded("No model is ready yet.", retry_after_s=retry_after(2.0), code="no_model")
            raise ModelNotFound(name[:256])
        return model

    def all(self) -> list[ServedModel]:
        return [self._models[name] for name in sorted(self._models)]

    def num_ready_workers(self) -> int:
        """Of models that can be asked for: a worker may be heard of before its card is read."""
        oldest = self._now() - WORKER_TIMEOUT_S
        return sum(
            worker.state is WorkerState.READY and worker.heard_at >= oldest and worker.model in self._models
            for worker in self._workers.values()
        )

    async def follow(self, bus: Bus, build: Callable[[ModelCard], TextEncoder] = TextEncoder) -> None:
        """Keeps up with cards and workers until cancelled."""
        hellos = await bus.subscribe(ALL_HELLOS, self._on_hello)
        try:
            cards = await watch_cards(bus, self._on_card)
            try:
                while True:
                    await self._has_new.wait()
                    self._has_new.clear()
                    await self._build_new(build)
            finally:
                await cards.close()
        finally:
            await hellos.close()

    def add(self, card: ModelCard, encoder: TextEncoder) -> None:
        self._models[card.model] = ServedModel(card, encoder)

    def _on_card(self, card: ModelCard) -> None:
        if card.model in self._models or len(self._models) + len(self._new_cards) < MAX_MODELS:
            self._new_cards[card.model] = card
            self._has_new.set()

    async def _build_new(self, build: Callable[[ModelCard], TextEncoder]) -> None:
        while self._new_cards:
            name = next(iter(self._new_cards))
            card = self._new_cards.pop(name)
            try:
                # Reading a tokenizer takes up to seconds.
                encoder = await asyncio.to_thread(build, card)
            except ProtocolError as error:
                log.error("model cannot be served", model=name, error=str(error))
                continue
            self.add(card, encoder)
            log.info("model known", model=name, context=card.context, vocab_size=card.vocab_size)

    def _on_hello(self, message: Message) -> None:
        try:
            hello = decode(message.data, Hello)
        except ProtocolError as error:
            log.warning("undecodable hello", error=str(error))
            return
        if hello.worker not in self._workers and len(self._workers) >= MAX_WORKERS:
            oldest = self._now() - WORKER_TIMEOUT_S
            self._workers = {key: worker for key, worker in self._workers.items() if worker.heard_at >= oldest}
            if len(self._workers) >= MAX_WORKERS:
                return
        if hello.state is WorkerState.LEAVING:
            self._workers.pop(hello.worker, None)
        else:
            self._workers[hello.worker] = _Worker(hello.model, hello.state, self._now())
