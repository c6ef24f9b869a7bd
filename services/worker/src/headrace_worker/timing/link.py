"""The I/O process's end of an engine that is no process: iterations run on the event loop and take their time there.

    inbox -> IterationLoop -> TimingEngine      what an iteration computes, at once
          -> sleep until it would have ended    -> frames

As in the engine process, what arrives during an iteration counts from the next one on.
"""

import asyncio
import os
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace_shared import codec
from headrace_shared.errors import ConfigError
from headrace_shared.tasks import end
from headrace_worker.config import EngineConfig, with_defaults
from headrace_worker.engine_frames import (
    FromEngine,
    Load,
    Loaded,
    Loading,
    Refused,
    Rest,
    Rested,
    ToEngine,
    TokenizerPart,
)
from headrace_worker.engine_link import MAX_UNSENT_BYTES, EngineDied
from headrace_worker.iteration import EngineFacts
from headrace_worker.loop import IterationLoop
from headrace_worker.loop_frames import apply_frame, iteration_frame
from headrace_worker.timing.cards import Cards
from headrace_worker.timing.engine import TimingEngine
from headrace_worker.timing.hardware import find_gpu
from headrace_worker.timing.roofline import Roofline
from headrace_worker.timing.settings import TimingSettings
from headrace_worker.timing.shapes import find_shape

MAX_UNREAD_FRAMES = 64
LOAD_STEPS = 20
MAX_LAG_S = 0.01
"""What a timer was late is made up for by the next iterations, up to this: timers are coarser than iterations."""
TURNS_BETWEEN = 4
"""Of the event loop, between two iterations: from a frame through session and connection to the socket, first tokens
before the others. They go out, and what has come by now is read, before the next iteration is composed; a process does
these side by side."""
BITS = {"int8": 8, "fp8": 8, "int4": 4}


class TimingLink:
    """Stands for an engine process. Belongs to one event loop; `close` ends it."""

    def __init__(self, settings: TimingSettings, config: EngineConfig, num_gpus: int, cards: Cards) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._config = with_defaults(config, on_gpu=True)
        bits = BITS.get(config.quantization, 16)
        self._roofline = Roofline(
            find_gpu(settings.gpu), find_shape(settings.gpu_model), num_gpus, bits, settings.timing_slowdown
        )
        self._cards = cards
        self._inbox: list[bytes] = []
        self._inbox_bytes = 0
        self._arrived = asyncio.Event()
        self._frames: asyncio.Queue[FromEngine | BaseException] = asyncio.Queue(MAX_UNREAD_FRAMES)
        self._generation = 0
        self._task = asyncio.create_task(self._run(), name="timing-engine")

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def pids(self) -> Sequence[int]:
        return ()

    def send(self, frame: Struct) -> None:
        self.send_bytes(codec.encode(frame))

    def send_bytes(self, data: bytes) -> None:
        """Takes an encoded frame. Raises EngineDied if the engine has stopped reading."""
        if self._task.done() or self._inbox_bytes > MAX_UNSENT_BYTES:
            raise EngineDied(None)
        self._inbox.append(data)
        self._inbox_bytes += len(data)
        self._arrived.set()

    async def read(self) -> FromEngine:
        """The next frame. Raises EngineDied at the end, and whatever else ended the engine."""
        frame = await self._frames.get()
        if isinstance(frame, BaseException):
            raise frame
        return frame

    async def close(self) -> None:
        await end(self._task)

    async def _run(self) -> None:
        try:
            await self._load()
            await self._serve()
        except ConfigError as error:
            await self._frames.put(Refused(key=error.key, problem=error.problem))
        except Exception as error:  # whatever it is, `read` raises it, as it would tell of an engine process that ended
            await self._frames.put(error)

    async def _load(self) -> None:
        while not any(isinstance(frame, Load) for frame in self._take()):
            await self._wait()
        config = self._config
        num_blocks = config.num_blocks or self._roofline.num_blocks(config.block_size, config.gpu_memory_share)
        shape = self._roofline.shape
        context = min(shape.context, config.context or shape.context, num_blocks * config.block_size)
        await self._frames.put(Loading(stage="reading the tokenizer", current=0, total=1))
        card = await self._cards.read(config.model, config.served_name)
        await self._spend_load_time()
        await self._frames.put(TokenizerPart(data=card.tokenizer))
        self._facts = EngineFacts(
            replace(card, tokenizer=b"", context=context, constrained_decoding=False),
            num_blocks,
            config.block_size,
            context,
            config.max_sequences,
            config.tokens_per_iteration,
            f"timing:{self._roofline.gpu.name}",
            "bfloat16",
        )
        await self._frames.put(Loaded(**self._facts._asdict()))

    async def _spend_load_time(self) -> None:
        seconds = self._settings.timing_load_s
        if not seconds:
            return
        for step in range(LOAD_STEPS):
            await self._frames.put(Loading(stage="loading weights", current=step, total=LOAD_STEPS))
            await asyncio.sleep(seconds / LOAD_STEPS)

    async def _serve(self) -> None:
        settings = self._settings
        engine = TimingEngine(self._roofline, self._facts, settings.timing_output_tokens)
        loop = IterationLoop(engine, clock=lambda: engine.elapsed_s)
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            before_s = engine.elapsed_s
            due = max(due, now() - MAX_LAG_S)
            result = loop.step()
            if result is None:
                await self._wait()
                due = now()
            else:
                due += engine.elapsed_s - before_s
                await asyncio.sleep(max(0.0, due - now()))
                if settings.timing_crash_after and engine.num_sampled >= settings.timing_crash_after:
                    raise EngineDied(1)
                if settings.timing_hang_after and engine.num_sampled >= settings.timing_hang_after:
                    await asyncio.Event().wait()
                await self._frames.put(iteration_frame(result, self._generation))
                for _ in range(TURNS_BETWEEN):
                    await asyncio.sleep(0)
            for frame in self._take():
                self._generation = apply_frame(frame, loop, self._generation)
                if isinstance(frame, Rest):
                    await self._frames.put(Rested(generation=self._generation))

    def _take(self) -> list[ToEngine]:
        """What has come since the last time."""
        data, self._inbox = self._inbox, []
        self._inbox_bytes = 0
        self._arrived.clear()
        return [codec.decode(each, ToEngine) for each in data]

    async def _wait(self) -> None:
        """Until something has come."""
        await self._arrived.wait()
