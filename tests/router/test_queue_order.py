"""In which order what waits is served."""

from headrace_router.queue_order import order_of, runs_of
from headrace_shared.fleet_messages import WaitingGroup


def group(sequence: int, flow: str = "", rank: int = 0, weight: float = 1.0, tokens: int = 100) -> WaitingGroup:
    return WaitingGroup(rank, sequence, 1, 1, tokens, 0, flow, weight)


def served(*groups: WaitingGroup) -> list[int]:
    return [entry.group.last_sequence for entry in order_of(groups).groups]


def test_one_flow_is_served_in_the_order_of_the_stream_whoever_tells_of_it() -> None:
    assert served(group(5), group(1), group(9), group(3)) == [1, 3, 5, 9]


def test_lower_ranks_go_first() -> None:
    assert served(group(1, rank=16), group(2, rank=0), group(3, rank=-1)) == [3, 2, 1]


def test_a_small_tenant_does_not_wait_for_a_large_one() -> None:
    large = [group(number, "large") for number in range(10)]
    assert served(*large, group(100, "small"))[:2] in ([0, 100], [100, 0])


def test_weights_share_in_proportion() -> None:
    groups = [group(number, "heavy", weight=3.0) for number in range(12)]
    groups += [group(100 + number, "light") for number in range(12)]
    first = served(*groups)[:8]
    assert sum(number < 100 for number in first) == 6


def test_a_newcomer_stands_behind_its_own_flow_only() -> None:
    order = order_of([group(number, "large") for number in range(10)])
    assert order.key_of_newcomer(0, "small", 1.0, 100) < order.groups[5].key
    assert order.key_of_newcomer(0, "large", 1.0, 100) > order.groups[-1].key
    assert order.key_of_newcomer(0, "worthless", 0.0, 100) > order.groups[-1].key


def test_runs_keep_everything_in_order_within_the_bound() -> None:
    for count in (0, 1, 5, 32, 33, 1000):
        runs = runs_of(range(count), 32)
        assert len(runs) <= 32 and [item for run in runs for item in run] == list(range(count))
