"""The device's random numbers are those of the CPU, bit for bit."""

from typing import Any

import numpy as np
import torch
import triton.language as tl

from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.noise import clock, first_to_ring, noise_key
from headrace_worker.noise import noise_keys
from headrace_worker.race import clocks


@jit
def _keys(seeds: Any, choices: Any, positions: Any, keys: Any) -> None:
    row = tl.program_id(0)
    key = noise_key(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row))
    tl.store(keys + row, key.to(tl.int64))


@jit
def _clocks(keys: Any, output: Any, start: Any, SIZE: tl.constexpr) -> None:
    row = tl.program_id(0)
    numbers = start + tl.arange(0, SIZE).to(tl.int64)
    values = clock(tl.load(keys + row).to(tl.uint64), numbers)
    tl.store(output + row * SIZE + tl.arange(0, SIZE), values)


@jit
def _race(keys: Any, rates: Any, output: Any, SIZE: tl.constexpr) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    _, index = first_to_ring(tl.load(rates + columns), tl.load(keys + row).to(tl.uint64), columns.to(tl.int64))
    tl.store(output + row, index)


def test_keys_are_those_of_the_cpu(device: torch.device) -> None:
    seeds = [0, 1, 7 << 40, (1 << 63) - 1, (1 << 32) + 5]
    choices, positions = [0, 1, 2, 127, 3], [0, 5, 1 << 20, 131_071, 2]
    expected = noise_keys(*(np.array(values, dtype=np.uint64) for values in (seeds, choices, positions)))
    given = [torch.tensor(values, dtype=torch.int64, device=device) for values in (seeds, choices, positions)]
    keys = torch.empty(5, dtype=torch.int64, device=device)
    _keys[(5,)](*given, keys)
    assert keys.tolist() == expected.tolist()


def test_clocks_are_those_of_the_cpu(device: torch.device) -> None:
    keys = torch.tensor([0, -1, 1 << 62, -(1 << 63), 12345], device=device)
    for start in (0, (1 << 32) + 128):
        output = torch.empty((5, 64), dtype=torch.float64, device=device)
        _clocks[(5,)](keys, output, start, SIZE=64)
        assert torch.equal(output.cpu(), clocks(keys.cpu()[:, None], start + torch.arange(64)[None, :]))


def test_who_has_no_rate_does_not_ring(device: torch.device) -> None:
    rates = torch.zeros(64, dtype=torch.float64, device=device)
    rates[41] = 1e-300
    output = torch.empty(20, dtype=torch.int32, device=device)
    _race[(20,)](torch.arange(20, device=device), rates, output, SIZE=64)
    assert output.tolist() == [41] * 20
