"""The paged cache."""

import mmap
import threading
from pathlib import Path

import pytest
import torch

from headrace_shared.messages import BlockId
from headrace_worker import pages_ahead
from headrace_worker.kv_cache import KVCache


def make_cache() -> KVCache:
    cache = KVCache(
        num_layers=3,
        num_blocks=5,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.pages[:, :5] = torch.randn((3, 5, 2, 2, 4, 8), generator=torch.Generator().manual_seed(0))
    return cache


def make_large_cache() -> KVCache:
    """128 MiB."""
    return KVCache(
        num_layers=4,
        num_blocks=2047,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_released_memory_is_zero_at_the_same_place_and_can_be_written() -> None:
    cache = KVCache(
        num_layers=2,
        num_blocks=300,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for small_or_large in (make_cache(), cache):
        small_or_large.pages.fill_(1.0)
        address = small_or_large.pages.data_ptr()
        small_or_large.release()
        assert not small_or_large.pages.any() and small_or_large.pages.data_ptr() == address
        small_or_large.layers[1][3] = 2.0
        assert small_or_large.pages.sum() == 2.0 * small_or_large.layers[1][3].numel()


def test_released_memory_goes_back_to_the_system() -> None:
    cache = make_large_cache()
    cache.pages.fill_(1.0)
    full = resident_bytes()
    cache.release()
    assert full - resident_bytes() > 100 << 20


def test_memory_comes_in_some_blocks_ahead_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "AHEAD_BYTES", 32 << 20)
    cache = make_large_cache()
    cache.pages[1, 3] = 5.0
    before = resident_bytes()
    cache.reach(BlockId(3))
    wait_for_ahead()
    assert 24 << 20 < resident_bytes() - before < 64 << 20
    cache.reach(BlockId(9))  # is near enough: nothing to do
    cache.reach(BlockId(2000))
    wait_for_ahead()
    assert resident_bytes() - before > 100 << 20
    assert cache.pages.sum() == 5.0 * cache.pages[1, 3].numel()
    cache.release()
    assert resident_bytes() - before < 16 << 20
    cache.reach(BlockId(3))
    wait_for_ahead()
    assert resident_bytes() - before > 24 << 20


def wait_for_ahead() -> None:
    for thread in threading.enumerate():
        if thread.name == "pages-ahead":
            thread.join(60.0)
            assert not thread.is_alive()


def test_small_caches_and_old_systems_wait_for_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache().reach(BlockId(0))
    monkeypatch.setattr(pages_ahead, "bring_in", lambda tensor: False)
    ahead = pages_ahead.PagesAhead(torch.zeros(2, 10, 3))
    ahead.reach(0)
    ahead.reach(9)
    wait_for_ahead()
    assert not any(thread.name == "pages-ahead" for thread in threading.enumerate())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_rows_and_slots_are_the_pages() -> None:
    cache = make_cache()
    block, part, head, offset = 3, 1, 1, 2
    row = (block * 2 + part) * 2 + head
    assert torch.equal(cache.layers[2][row], cache.pages[2, block, part, head].flatten())
    new = torch.arange(8.0)
    before = cache.pages.clone()
    cache.write(2, torch.tensor([[row * 4 + offset]]), new[None, None])
    assert torch.equal(cache.pages[2, block, part, head, offset], new)
    before[2, block, part, head, offset] = new
    assert torch.equal(cache.pages, before)


def test_a_copied_block_has_every_layer_keys_and_values() -> None:
    cache = make_cache()
    before = cache.pages.clone()
    cache.copy_blocks([(BlockId(1), BlockId(4)), (BlockId(0), BlockId(2))])
    before[:, 4], before[:, 2] = before[:, 1].clone(), before[:, 0].clone()
    assert torch.equal(cache.pages, before)
    cache.copy_blocks([])
    assert torch.equal(cache.pages, before)


def test_clearing_touches_only_what_is_named() -> None:
    cache = make_cache()
    before = cache.pages.clone()
    cache.clear_after(BlockId(1), 3)
    cache.clear_blocks(torch.tensor([4]))
    before[:, 1, :, :, 3:] = 0
    before[:, 4] = 0
    assert torch.equal(cache.pages, before)


def test_the_null_block_is_beyond_the_ids_and_zero() -> None:
    cache = make_cache()
    assert cache.null_block == cache.num_blocks == 5
    assert not cache.pages[:, cache.null_block].any()
