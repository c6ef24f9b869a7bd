from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_scheduler.blocks import BlockPool
from headrace_scheduler.prefix_index import BlockHash
from headrace_shared.messages import BlockId


def content(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def index(pool: BlockPool, block_ids: Iterable[BlockId], hashes: Iterable[BlockHash]) -> None:
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.index(block_id, block_hash)


def give_back(pool: BlockPool, block_ids: list[BlockId]) -> None:
    pool.give_up(block_ids)
    pool.confirm(block_ids)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_referenced, pool.num_awaiting


def test_blocks_given_up_are_free_only_when_confirmed() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    assert counts(pool) == (1, 3, 0)
    pool.give_up(held)
    assert counts(pool) == (1, 0, 3)
    pool.confirm(held)
    assert counts(pool) == (4, 0, 0)
    pool.check_integrity([], [])


def test_a_shared_block_is_held_until_its_last_holder_gives_it_up() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.share(held)
    give_back(pool, held)
    assert counts(pool) == (1, 1, 0)
    give_back(pool, held)
    assert counts(pool) == (2, 0, 0)


def test_an_awaited_block_can_be_shared_again() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    index(pool, held, content("a"))
    pool.give_up(held)
    pool.share(pool.match(content("a"), 1))
    assert counts(pool) == (1, 1, 0)
    pool.confirm(held)
    pool.check_integrity([held], [])
    give_back(pool, held)
    assert counts(pool) == (2, 0, 0)


def test_the_longest_indexed_prefix_matches() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    index(pool, [held[0], held[2]], content("a", "c"))
    assert pool.match(content("a", "b", "c"), 3) == held[:1]
    index(pool, [held[1]], content("b"))
    assert pool.match(content("a", "b", "c", "d"), 4) == held
    assert pool.match(content("a", "b", "c"), 2) == held[:2]


def test_of_equal_blocks_the_first_stays_known() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    index(pool, [first, second], content("a", "a"))
    assert pool.match(content("a"), 1) == [first]
    pool.check_integrity([[first, second]], [])


def test_cached_blocks_are_free_and_evicted_longest_unused_first_from_the_end_of_a_prefix() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    index(pool, old, content("a", "b"))
    index(pool, new, content("c", "d"))
    give_back(pool, old)
    give_back(pool, new)
    assert counts(pool) == (4, 0, 0)
    assert pool.allocate(1) == old[1:]
    assert pool.match(content("a", "b"), 2) == old[:1]
    assert pool.match(content("c", "d"), 2) == new


def test_use_of_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    index(pool, first + second, content("a", "b"))
    give_back(pool, first)
    give_back(pool, second)
    pool.share(first)
    give_back(pool, first)
    assert pool.allocate(1) == second


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    index(pool, held, content("a"))
    give_back(pool, held)
    assert pool.allocate(1) != held
    assert pool.match(content("a"), 1) == held


def test_free_blocks_among_a_match_are_counted() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    index(pool, held, content("a", "b"))
    give_back(pool, held[1:])
    assert pool.count_free(held) == 1


def test_a_pool_with_given_tables_counts_their_references() -> None:
    pool = BlockPool(4, [ids(0, 1), ids(0, 2)])
    assert counts(pool) == (1, 3, 0)
    assert pool.allocate(1) == [3]
    pool.check_integrity([ids(0, 1), ids(0, 2), ids(3)], [])


def test_more_than_is_free_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match=r"\(3, 2\)"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0)


def test_integrity_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity([], [])


@given(st.lists(st.tuples(st.sampled_from("asgci"), st.integers(0, 7)), max_size=60))
def test_every_history_accounts_for_every_block(events: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    held: list[list[BlockId]] = []
    awaited: list[list[BlockId]] = []
    for kind, number in events:
        if kind == "a" and number <= pool.num_free:
            held.append(pool.allocate(number))
        elif kind == "s":
            shared = pool.match(content("0", "1", "2"), number)
            pool.share(shared)
            held.append(shared)
        elif kind == "g" and held:
            table = held.pop(number % len(held))
            pool.give_up(table)
            awaited.append(table)
        elif kind == "c" and awaited:
            pool.confirm(awaited.pop(number % len(awaited)))
        elif kind == "i" and held:
            for i, block_id in enumerate(held[number % len(held)][:3]):
                pool.index(block_id, BlockHash(str(i).encode()))
        pool.check_integrity(held, awaited)
    for table in held:
        pool.give_up(table)
    for table in held + awaited:
        pool.confirm(table)
    assert pool.num_free == 6
