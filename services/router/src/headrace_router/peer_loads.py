"""What the other routers have in one model's queue and on its workers, as they told last. Pure."""

from headrace_shared.fleet_messages import RouterLoad, RunningGroup, WaitingGroup
from headrace_shared.messages import RouterId

LOAD_TIMEOUT_S = 2.5
"""A router not heard of for so long has nothing waiting, as far as we know."""
SPEAKS_S = 0.6
"""Whoever has anything speaks four times a second. Who fell silent has nothing new, and what others queued since is not
his."""
MAX_ROUTERS = 1000
MAX_TOLD = 200_000
"""Sequences that one router may say it has."""
MAX_TOKENS = 1 << 40
"""And tokens, in one of its groups."""
MAX_WEIGHT = 1e9


def is_plausible(load: RouterLoad) -> bool:
    """The forecast plays each choice through: whoever says that there are a trillion would keep everybody busy."""
    waiting, running = load.waiting, load.running
    num_told = sum(group.num_choices for group in waiting) + sum(group.num_choices for group in running)
    return (
        num_told <= MAX_TOLD
        and all(0 < group.num_requests <= group.num_choices <= MAX_TOLD for group in waiting)
        and all(0 <= group.prompt_tokens <= MAX_TOKENS and 0 <= group.output_tokens <= MAX_TOKENS for group in waiting)
        and all(0.0 <= group.weight <= MAX_WEIGHT for group in waiting)
        and all(0 <= group.num_choices <= MAX_TOLD and 0 <= group.tokens_left <= MAX_TOKENS for group in running)
    )


class PeerLoads:
    def __init__(self) -> None:
        self._loads: dict[RouterId, tuple[RouterLoad, float]] = {}
        """And when each was heard."""

    def hear(self, load: RouterLoad, now: float) -> None:
        if load.router in self._loads or len(self._loads) < MAX_ROUTERS:
            self._loads[load.router] = (load, now)

    def expire(self, now: float) -> None:
        self._loads = {key: entry for key, entry in self._loads.items() if now - entry[1] <= LOAD_TIMEOUT_S}

    @property
    def num_requests(self) -> int:
        """At most: one that runs may have several choices."""
        loads = [load for load, _ in self._loads.values()]
        num_waiting = sum(group.num_requests for load in loads for group in load.waiting)
        return num_waiting + sum(group.num_choices for load in loads for group in load.running)

    def newest_sequences(self, now: float) -> list[int]:
        """Up to which each that speaks has told all of its own."""
        return [load.newest_sequence for load, heard_at in self._loads.values() if now - heard_at <= SPEAKS_S]

    def waiting(self) -> list[WaitingGroup]:
        return [group for load, _ in self._loads.values() for group in load.waiting]

    def running(self, token_s: float, now: float) -> list[RunningGroup]:
        """They have gone on since they were told of, by a token each `token_s`."""
        return [
            _aged(group, now - heard_at, token_s) for load, heard_at in self._loads.values() for group in load.running
        ]


def _aged(group: RunningGroup, age_s: float, token_s: float) -> RunningGroup:
    if token_s <= 0.0:
        return group
    return RunningGroup(group.num_choices, round(max(0.0, group.tokens_left - age_s / token_s)))
