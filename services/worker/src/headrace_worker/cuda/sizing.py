"""How many blocks the cache of a device gets, and which batch sizes are recorded. Pure."""

from typing import NamedTuple

_RECORD_BYTES = 32 << 20
"""Of one recorded batch size, beside the intermediate memory that all share: its launches and their arguments."""


class Sizes(NamedTuple):
    """Of an engine."""

    context: int
    block_size: int
    num_blocks: int
    """0: as many as fit."""
    max_sequences: int
    tokens_per_iteration: int
    memory_share: float
    """Of the device's memory, for this process."""
    max_loras: int = 0
    max_lora_rank: int = 0


class DeviceMemory(NamedTuple):
    """Bytes."""

    total: int
    free: int
    own: int
    """Held by this process."""


def blocks_that_fit(
    memory: DeviceMemory, *, share: float, peak_bytes: int, num_records: int, block_bytes: int, kept_bytes: int = 0
) -> int:
    """Blocks beside what is in memory already and what iterations take. May be below 1.

    `share` of all memory is what this process may use; others' use of the rest is not its business. `peak_bytes`: of
    one iteration. It counts twice, since recorded work keeps intermediate memory of its own. `kept_bytes`: for what is
    loaded later."""
    reserved = 2 * peak_bytes + num_records * _RECORD_BYTES + kept_bytes
    # One more block, the null block, takes as much.
    return min(int(memory.total * share) - memory.own, memory.free) // block_bytes - -(-reserved // block_bytes) - 1


def batch_sizes(max_sequences: int) -> list[int]:
    """Ascending, ending with `max_sequences`: few rows are wasted where each costs most of its time for itself."""
    sizes = [1, 2, 4, *range(8, min(max_sequences, 256), 8), *range(256, max_sequences, 32)]
    return [*(size for size in sizes if size < max_sequences), max_sequences]
