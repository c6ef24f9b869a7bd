"""The I/O process's end of an engine of several ranks: starts them, watches them, ends them all when one is lost.

To the service it looks like the link to one engine process: what the leader says is passed on, and the group's loss is
raised from `read`. It owns a task for each rank and one that checks their signs of life.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from headrace_shared import codec
from headrace_shared.errors import HeadraceError, ProtocolError
from headrace_shared.tasks import end
from headrace_worker.engine_frames import Beat, FromEngine, Load, RankFailed, Refused
from headrace_worker.engine_link import EngineDied, EngineLink
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.watch import DUMP_SIGNAL, RankLoss, RankWatch, explain
from headrace_worker.starvation import Starvation, run_delays

CHECK_S = 0.25
SETTLE_S = 0.3
"""For the losses that come with the first one: the one that explains them may arrive last."""
DUMP_S = 0.3
"""For hanging ranks to write down where they are."""
MAX_UNREAD_FRAMES = 1024

log = structlog.get_logger(__name__)


class RankLost(HeadraceError):
    """The group of ranks is beyond repair."""

    def __init__(self, problem: str, world_size: int) -> None:
        super().__init__(f"the group of {world_size} ranks is lost: {problem}")
        self.problem = problem


class RankGroup:
    """The ranks of this machine. Belongs to one event loop."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        places: Sequence[RankPlace],
        hang_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = links
        self._places = places
        self._clock = clock
        self._watch = RankWatch([place.rank for place in places], hang_timeout_s, clock())
        self._starvation = Starvation(lambda: run_delays(self.pids))
        self._frames: asyncio.Queue[FromEngine | RankLost] = asyncio.Queue(MAX_UNREAD_FRAMES)
        self._losses: list[RankLoss] = []
        self._tasks = [
            asyncio.create_task(self._listen(link, place), name=f"rank-{place.rank}")
            for link, place in zip(links, places, strict=True)
        ]
        self._tasks.append(asyncio.create_task(self._check(), name="rank-watch"))

    @classmethod
    async def start(
        cls, module: str, places: Sequence[RankPlace], hang_timeout_s: float, environ: dict[str, str]
    ) -> "RankGroup":
        """Starts a process for each place. The descriptors in them are the caller's, to be closed afterwards."""
        links: list[EngineLink] = []
        try:
            for place in places:
                inherited = [fd for fd in (place.store_fd, place.command_fd) if fd is not None]
                links.append(await EngineLink.start(module, inherited=inherited, environ=environ))
                log.info("rank started", rank=place.rank, pid=links[-1].pid)
        except BaseException:
            await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
            raise
        return cls(links, places, hang_timeout_s)

    @property
    def pid(self) -> int:
        """Of the first rank here."""
        return self._links[0].pid

    @property
    def pids(self) -> Sequence[int]:
        """Of the ranks here."""
        return [link.pid for link in self._links]

    def memory(self) -> dict[int, tuple[int, int]]:
        """(bytes in main memory, bytes on the GPU) of each rank here."""
        return self._watch.memory()

    def send(self, frame: Struct) -> None:
        """`Load` goes to every rank, with its place; anything else to the leader alone. Raises EngineDied."""
        if isinstance(frame, Load):
            for link, place in zip(self._links, self._places, strict=True):
                link.send(Load(config=replace(frame.config, place=place)))
        else:
            self.send_bytes(codec.encode(frame))

    def send_bytes(self, data: bytes) -> None:
        """An encoded frame for the leader. Raises EngineDied if it has stopped reading; that it is gone is for `read`
        to tell, which knows why."""
        try:
            self._links[0].send_bytes(data)
        except EngineDied as error:
            if error.exit_code is None and not self._losses:
                raise

    async def read(self) -> FromEngine:
        """The leader's next frame, or a refusal of any rank. Raises RankLost when a rank has died, failed or hangs."""
        frame = await self._frames.get()
        if isinstance(frame, RankLost):
            raise frame
        return frame

    async def close(self) -> None:
        """Ends all ranks: none of them has a state worth keeping. Idempotent."""
        for task in self._tasks:
            await end(task)
        await asyncio.gather(*(link.close() for link in self._links))

    async def _listen(self, link: EngineLink, place: RankPlace) -> None:
        try:
            while True:
                frame = await link.read()
                if isinstance(frame, Beat):
                    self._watch.on_beat(place.rank, frame, self._clock())
                elif isinstance(frame, RankFailed):
                    self._lose(RankLoss(place.rank, None, frame.problem, frame.is_consequence))
                    return
                elif place.is_leader or isinstance(frame, Refused):
                    await self._frames.put(frame)
        except EngineDied as error:
            self._lose(RankLoss(place.rank, error.exit_code, None, False))
        except ProtocolError as error:
            self._lose(RankLoss(place.rank, None, f"it sent nonsense: {error}", False))

    def _lose(self, loss: RankLoss) -> None:
        log.error("rank lost", rank=loss.rank, reason=loss.describe(), is_consequence=loss.is_consequence)
        self._losses.append(loss)
        if len(self._losses) == 1:
            self._tasks.append(asyncio.create_task(self._settle(), name="rank-loss"))

    async def _settle(self) -> None:
        await asyncio.sleep(SETTLE_S)
        await self._give_up(explain(self._losses))

    async def _check(self) -> None:
        while not self._losses:
            await asyncio.sleep(CHECK_S)
            now = self._clock()
            if self._watch.is_late(now):
                self._watch.excuse(self._starvation.lap(now))
            else:
                self._starvation.reset()
            problem = self._watch.check(now)
            if problem is not None and not self._losses:
                log.error("ranks hang: what they are doing follows", reason=problem)
                for link in self._links:
                    link.signal(DUMP_SIGNAL)
                await asyncio.sleep(DUMP_S)
                await self._give_up(problem)
                return

    async def _give_up(self, problem: str) -> None:
        await self._frames.put(RankLost(problem, self._places[0].world_size))
