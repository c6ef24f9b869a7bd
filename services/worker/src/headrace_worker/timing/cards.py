"""The cards that timing-model workers serve: those of real models, read by a process that ends then.

The libraries that read tokenizers and checkpoints take hundreds of megabytes, which end with it.
"""

import asyncio

from msgspec.structs import replace

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import Load, Loaded, Refused, TokenizerPart
from headrace_worker.engine_link import EngineLink

MODULE = "headrace_worker.timing.card_process"


class Cards:
    """Reads a model's card once, for all workers of the process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._cards: dict[tuple[str, str], ModelCard] = {}

    async def read(self, model: str, served_name: str) -> ModelCard:
        """With its tokenizer; its context is the model's own. Raises ConfigError, or EngineDied if the process dies."""
        async with self._lock:
            key = (model, served_name)
            if key not in self._cards:
                self._cards[key] = await _read(EngineConfig(model=model, served_name=served_name))
            return self._cards[key]


async def _read(config: EngineConfig) -> ModelCard:
    link = await EngineLink.start(MODULE)
    tokenizer = bytearray()
    try:
        link.send(Load(config=config))
        while True:
            frame = await link.read()
            if isinstance(frame, TokenizerPart):
                tokenizer += frame.data
            elif isinstance(frame, Refused):
                raise ConfigError(frame.key, frame.problem)
            elif isinstance(frame, Loaded):
                return replace(frame.card, tokenizer=bytes(tokenizer))
    finally:
        await link.close()
