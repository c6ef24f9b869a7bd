"""The paged cache."""

import mmap
from pathlib import Path

import torch

from headrace_shared.messages import BlockId
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
    cache = KVCache(
        num_layers=4,
        num_blocks=2047,
        block_size=16,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )  # 128 MiB
    cache.pages.fill_(1.0)
    full = resident_bytes()
    cache.release()
    assert full - resident_bytes() > 100 << 20


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
