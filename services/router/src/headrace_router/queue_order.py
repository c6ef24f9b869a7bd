"""In which order what waits is served. Pure.

Lower ranks (lanes, classes) first. Within a rank flows share by weight: each flow's virtual time advances by the tokens
it is served, divided by its weight, and whoever is furthest behind is next (fair queueing: Demers, Keshav and Shenker,
1989; for tokens: Sheng et al., 2024). A single flow is served in the order of the stream.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from headrace_shared.fleet_messages import WaitingGroup

LEAST_WEIGHT = 1e-6

Key = tuple[int, float, int]
"""Rank, virtual time at the end of the group, last stream sequence."""
Flow = tuple[int, str]
"""Rank and name."""


class Ordered(NamedTuple):
    key: Key
    group: WaitingGroup
    owner: int
    """Position in what was given."""


class Order(NamedTuple):
    groups: list[Ordered]
    tails: dict[Flow, float]
    """Virtual time at which the next request of a flow would begin."""

    def key_of_newcomer(self, rank: int, flow: str, weight: float, num_tokens: float) -> Key:
        """Behind all of its flow that waits now."""
        return rank, self.tails.get((rank, flow), 0.0) + num_tokens / max(weight, LEAST_WEIGHT), NEWEST


NEWEST = 1 << 62
_T = TypeVar("_T")


def order_of(groups: Sequence[WaitingGroup]) -> Order:
    by_flow: dict[Flow, list[tuple[int, WaitingGroup]]] = {}
    for owner, group in enumerate(groups):
        by_flow.setdefault((group.rank, group.flow), []).append((owner, group))
    ordered: list[Ordered] = []
    tails: dict[Flow, float] = {}
    for flow, members in by_flow.items():
        virtual = 0.0
        for owner, group in sorted(members, key=_by_sequence):
            virtual += (group.prompt_tokens + group.output_tokens) / max(group.weight, LEAST_WEIGHT)
            ordered.append(Ordered((group.rank, virtual, group.last_sequence), group, owner))
        tails[flow] = virtual
    ordered.sort(key=lambda entry: entry.key)
    return Order(ordered, tails)


def runs_of(items: Iterable[_T], max_runs: int) -> list[list[_T]]:
    """Cuts a sequence into at most `max_runs` pieces of about equal length."""
    found = list(items)
    if not found:
        return []
    length = -(-len(found) // max_runs)
    return [found[start : start + length] for start in range(0, len(found), length)]


def _by_sequence(member: tuple[int, WaitingGroup]) -> int:
    return member[1].last_sequence
