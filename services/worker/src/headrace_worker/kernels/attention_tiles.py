"""How the attention kernels are cut for a GPU, chosen from compiled code: matrix instructions, and nothing spilled.

Decoding is bound by memory: 64 positions at a time, three tiles on their way, so that with two or more programs on a
multiprocessor about 100 KiB are always in flight. Prompts are bound by matrix instructions: as many rows and positions
as registers hold.
"""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    rows: int
    """Queries times heads; decoding has as many as share a key-value head, padded."""
    positions: int
    num_stages: int
    """Of Triton's pipeline, in which reading the block table takes every other one."""
    num_warps: int
    max_registers: int | None = None
    """Of a thread, where two programs shall fit on a multiprocessor."""

    @property
    def options(self) -> dict[str, int]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


LARGE_AMPERE, HOPPER, LARGE_BLACKWELLS = 80, 90, (100, 103)
"""Compute capabilities of data centres' GPUs; others have 99 KiB of shared memory and Ampere's matrix instructions."""

_INTERPRETED = Tile(rows=32, positions=16, num_stages=1, num_warps=4)
"""Small, so that small tests cross its borders."""


def decode_tile(head_dim: int, group: int, is_fp8: bool, capability: int) -> Tile:
    """capability: 90 for compute capability 9.0; 0: the interpreter."""
    columns = max(16, 1 << (group - 1).bit_length())
    if not capability:
        return _INTERPRETED._replace(rows=columns)
    few = head_dim > 128 and capability != HOPPER
    return Tile(columns, 32 if few or columns > 32 else 64, 7 if is_fp8 else 5, 4)


def prefill_tile(head_dim: int, is_fp8: bool, capability: int) -> Tile:
    if not capability:
        return _INTERPRETED
    is_large = capability in (HOPPER, *LARGE_BLACKWELLS)
    if head_dim > 128:
        if is_large:
            return Tile(64, 32 if is_fp8 else 64, 3, 8)
        return Tile(64, 32 if capability == LARGE_AMPERE else 16, 5, 8)
    if head_dim <= 64 and not is_fp8 and capability <= HOPPER:
        return Tile(128, 64, 5, 8, 128)
    if is_fp8 or not is_large:
        return Tile(128, 64, 5, 8)
    return Tile(128, 128, 3, 8)


def capability_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def decode_programs(head_dim: int, is_fp8: bool) -> int:
    """Programs of the decode kernel that a multiprocessor has registers and shared memory for."""
    if is_fp8:
        return 3 if head_dim <= 128 else 2
    return max(1, 256 // max(head_dim, 64))
