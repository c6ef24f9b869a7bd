import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_autoscaler.gpu_inventory import Gpu, NotEnoughGpus, assign, listed_gpus, named_gpus

EIGHT = tuple(Gpu(f"GPU-{index:02x}", index) for index in range(8))


def ids(*indices: int) -> tuple[str, ...]:
    return tuple(f"GPU-{index:02x}" for index in indices)


@pytest.mark.parametrize(
    ("taken", "count", "expected"),
    [
        ((), 1, ids(0)),
        (ids(0), 1, ids(1)),
        ((), 4, ids(0, 1, 2, 3)),
        (ids(1), 2, ids(2, 3)),
        (ids(1, 4, 5), 2, ids(2, 3)),
        (ids(1, 4, 5), 1, ids(0)),
        (ids(1, 3, 5, 7), 2, ids(0, 2)),
        ((), 0, ()),
    ],
)
def test_a_worker_takes_neighbours_where_there_are(
    taken: tuple[str, ...], count: int, expected: tuple[str, ...]
) -> None:
    assert assign(EIGHT, taken, count) == expected


def test_what_is_not_free_is_told() -> None:
    with pytest.raises(NotEnoughGpus, match="takes 2 GPUs together, and 1 of 8 are free"):
        assign(EIGHT, ids(*range(7)), 2)


@given(st.lists(st.integers(1, 4), max_size=12), st.data())
def test_no_gpu_is_given_to_two_workers(sizes: list[int], data: st.DataObject) -> None:
    """Over any history of workers of any size that come and go."""
    workers: list[tuple[str, ...]] = []
    for size in sizes:
        if workers:
            for index in data.draw(st.sets(st.integers(0, len(workers) - 1), max_size=1), "who leaves"):
                workers.pop(index)
        taken = [gpu for worker in workers for gpu in worker]
        if len(EIGHT) - len(taken) < size:
            with pytest.raises(NotEnoughGpus):
                assign(EIGHT, taken, size)
            continue
        workers.append(assign(EIGHT, taken, size))
        assert len(set(workers[-1])) == size
        held = [gpu for worker in workers for gpu in worker]
        assert len(held) == len(set(held))


def test_reservations_are_understood_by_index_by_uuid_and_by_number() -> None:
    assert named_gpus(EIGHT, ["0", "GPU-03", "GPU-of-another-machine"], 0) == set(ids(0, 3))
    assert named_gpus(EIGHT, [], -1) == set(ids(*range(8)))
    assert named_gpus(EIGHT, [], 2) == set(ids(0, 1))


def test_a_listed_inventory_names_what_is_wrong_with_it() -> None:
    assert listed_gpus(["2", "GPU-aa"]) == (Gpu("2", 2), Gpu("GPU-aa", 1))
    with pytest.raises(ValueError, match="listed twice"):
        listed_gpus(["0", "0"])
    with pytest.raises(ValueError, match="neither an index nor a UUID"):
        listed_gpus(["../0"])
