"""When a group of ranks is given up. Pure: it is told what was heard of the ranks and what time it is."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

from headrace_worker.engine_frames import Beat

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write what its threads are doing to its log, whatever they are doing."""
LOADING_SILENCE_S = 60.0
"""While a rank loads, long calls into libraries may keep its other threads from running."""
SILENT_SHARE = 0.7
STUCK_SHARE = 0.85
"""Of the time after which the engine counts as hanging: what is to happen within it must be decided before."""
LATE_S = 1.2
"""Ranks tell of themselves twice a second."""
FROZEN_S = 1.0
"""A gap between two checks that the supervisor itself was stopped for."""


class RankLoss(NamedTuple):
    """One rank's end. Its cause explains those of others, which is why several are compared."""

    rank: int
    exit_code: int | None
    """Negative for a signal, None if the process has not ended yet."""
    problem: str | None
    """What it said itself."""
    is_consequence: bool

    def describe(self) -> str:
        if self.problem is not None:
            return f"rank {self.rank} failed: {self.problem}"
        if self.exit_code is not None and self.exit_code < 0:
            return f"rank {self.rank} was killed by signal {-self.exit_code}"
        how = "closed its connection" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"rank {self.rank} {how}"


def explain(losses: list[RankLoss]) -> str:
    """The loss that brought the others about, in order of arrival: nobody is killed by a lost connection, but whoever
    has one to a killed rank fails, and may be heard first."""
    ordered = sorted(losses, key=lambda loss: (loss.is_consequence, loss.exit_code is None or loss.exit_code >= 0))
    return ordered[0].describe()


class RankWatch:
    """What is known of the ranks' signs of life."""

    def __init__(self, ranks: Sequence[int], hang_timeout_s: float, now: float) -> None:
        self._silence_s = SILENT_SHARE * hang_timeout_s
        self._stuck_s = STUCK_SHARE * hang_timeout_s
        self._ranks = {rank: _RankState(now) for rank in ranks}
        self._checked_at = now

    def on_beat(self, rank: int, beat: Beat, now: float) -> None:
        state = self._ranks[rank]
        state.heard_at = now
        if not beat.is_busy or state.beat is None or beat.num_steps != state.beat.num_steps:
            state.moved_at = now
        # Two threads of a rank tell: a beat may come after a later one.
        state.is_serving = state.is_serving or beat.is_serving
        state.beat = beat

    def is_late(self, now: float) -> bool:
        """Some rank tells nothing, or does not get on, for longer than usual."""
        return any(
            now - state.heard_at > LATE_S or (state.is_busy and now - state.moved_at > LATE_S)
            for state in self._ranks.values()
        )

    def excuse(self, seconds: float) -> None:
        """For so long one of them had no core, and the others may have waited for it."""
        for state in self._ranks.values():
            state.heard_at += seconds
            state.moved_at += seconds

    def check(self, now: float) -> str | None:
        """Why the group is to be given up; None if it is well."""
        frozen_for_s = now - self._checked_at
        self._checked_at = now
        if frozen_for_s > FROZEN_S:
            self.excuse(frozen_for_s)
            return None
        for rank, state in self._ranks.items():
            limit_s = self._silence_s if state.is_serving else max(self._silence_s, LOADING_SILENCE_S)
            if now - state.heard_at > limit_s:
                return f"rank {rank} has given no sign of life for {now - state.heard_at:.1f} s"
        stuck = [rank for rank, state in self._ranks.items() if state.is_busy and now - state.moved_at > self._stuck_s]
        if stuck:
            longest_s = max(now - self._ranks[rank].moved_at for rank in stuck)
            which = f"rank {stuck[0]}" if len(stuck) == 1 else "ranks " + ", ".join(map(str, stuck))
            return f"{which} did not get on with an iteration for {longest_s:.1f} s"
        return None

    def memory(self) -> dict[int, tuple[int, int]]:
        """(bytes in main memory, bytes on the GPU) by rank, as last heard."""
        return {
            rank: (state.beat.memory_bytes, state.beat.device_bytes)
            for rank, state in self._ranks.items()
            if state.beat is not None
        }


class _RankState:
    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.moved_at = now
        """When it was last idle or had finished something."""
        self.beat: Beat | None = None
        self.is_serving = False

    @property
    def is_busy(self) -> bool:
        return self.beat is not None and self.beat.is_busy
