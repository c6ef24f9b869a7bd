"""A rank from within: joins its group, then leads or follows, and says why when it cannot go on."""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from msgspec import Struct

from headrace_shared.errors import ConfigError
from headrace_worker.engine_frames import RankFailed
from headrace_worker.iteration import Engine
from headrace_worker.parallel.channel import FollowerChannel, LeaderChannel, PeerLost
from headrace_worker.parallel.follower import Follower
from headrace_worker.parallel.leader import LeaderEngine
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.pulse import Pulse
from headrace_worker.parallel.watch import DUMP_SIGNAL

JOIN_TIMEOUT_S = 120.0
"""All ranks are started at the same time; a slow disk may keep one of them from its libraries for so long."""
EXIT_FAILED = 1
EXIT_PEER_LOST = 3
MAX_PROBLEM_CHARS = 500


class Rank:
    """Use as a context: an exception inside ends the process, after it was told to the supervisor. A ConfigError passes
    through."""

    def __init__(self, place: RankPlace, send: Callable[[Struct], None]) -> None:
        self._place = place
        self._send = send
        self._pulse = Pulse(send)
        self._channel: LeaderChannel | FollowerChannel | None = None

    def __enter__(self) -> "Rank":
        faulthandler.register(DUMP_SIGNAL)
        self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, ConfigError):
            traceback.print_exception(error)
            # Not by way of the interpreter's end: what waits for a lost rank there may wait for ever.
            self._fail(f"{type(error).__name__}: {error}", is_consequence=isinstance(error, PeerLost))

    def join(self) -> None:
        """Connects with the other ranks. Raises PeerLost."""
        if self._place.is_leader:
            self._channel = LeaderChannel.open(self._place, JOIN_TIMEOUT_S, self._on_lost)
        else:
            self._channel = FollowerChannel.open(self._place, JOIN_TIMEOUT_S, self._on_lost)

    def lead(self, engine: Engine) -> LeaderEngine:
        assert isinstance(self._channel, LeaderChannel), "a follower that leads, or has not joined"
        self._pulse.serve(engine.facts.device)
        return LeaderEngine(engine, self._channel, self._place, self._pulse)

    def follow(self, engine: Engine) -> NoReturn:
        assert isinstance(self._channel, FollowerChannel), "a leader that follows, or has not joined"
        self._pulse.serve(engine.facts.device)
        Follower(engine, self._channel, self._place, self._pulse).run()

    def _on_lost(self, problem: str) -> NoReturn:
        self._fail(problem, is_consequence=True)

    def _fail(self, problem: str, *, is_consequence: bool) -> NoReturn:
        try:
            self._send(RankFailed(problem=problem[:MAX_PROBLEM_CHARS], is_consequence=is_consequence))
        finally:
            sys.stderr.flush()
            os._exit(EXIT_PEER_LOST if is_consequence else EXIT_FAILED)
