import pytest

from headrace_scheduler.prefix_index import block_hash, extend_chain, last_hash, root_hash
from headrace_shared.codec import pack_ids

ROOT = root_hash("m", "", 4)


@pytest.mark.parametrize("other", [("n", "", 4), ("m", "s", 4), ("m", "", 8), ("", "m", 4)])
def test_every_part_of_the_root_counts(other: tuple[str, str, int]) -> None:
    assert root_hash(*other) != ROOT


def test_model_and_salt_do_not_run_together() -> None:
    assert root_hash("ab", "c", 4) != root_hash("a", "bc", 4)


def test_the_content_of_an_adapter_counts_and_runs_into_nothing_else() -> None:
    roots = [
        ROOT,
        root_hash("m", "", 4, "a"),
        root_hash("m", "", 4, "b"),
        root_hash("m", "a", 4),
        root_hash("ma", "", 4),
        root_hash("m", "b", 4, "a"),
    ]
    assert len(set(roots)) == len(roots)


def test_only_full_blocks_have_a_hash() -> None:
    assert len(extend_chain(ROOT, pack_ids(range(11)), 4)) == 2
    assert extend_chain(ROOT, pack_ids(range(3)), 4) == []


def test_equal_blocks_after_different_prefixes_differ() -> None:
    one = extend_chain(ROOT, pack_ids([1, 2, 3, 4, 9, 9, 9, 9]), 4)
    two = extend_chain(ROOT, pack_ids([5, 6, 7, 8, 9, 9, 9, 9]), 4)
    assert one[1] != two[1]


def test_a_chain_can_be_continued_from_its_last_hash() -> None:
    whole = extend_chain(ROOT, pack_ids(range(12)), 4)
    assert block_hash(last_hash(ROOT, whole, 2), pack_ids(range(8, 12))) == whole[2]
    assert last_hash(ROOT, whole, 0) == ROOT
