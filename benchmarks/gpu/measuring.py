"""Times and ceilings. On a machine without a GPU the same code runs on the CPU at sizes that mean nothing."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
IS_DRY = DEVICE.type == "cpu"
DTYPE = torch.float16 if IS_DRY else torch.bfloat16
"""The interpreter knows no matrix products in bfloat16."""


class Ceilings(NamedTuple):
    bytes_per_s: float
    """Of a copy within the device's memory, bytes read and bytes written."""
    flops_per_s: float
    """Of a large bfloat16 matrix product on random data."""


def ceilings() -> Ceilings:
    """Measured, not read from a data sheet."""
    return Ceilings(_copied_bytes_per_s(1 << (20 if IS_DRY else 31)), _product_flops_per_s(128 if IS_DRY else 8192))


def _copied_bytes_per_s(size: int) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def _product_flops_per_s(width: int) -> float:
    left, right = (torch.randn(width, width, device=DEVICE).to(DTYPE) for _ in range(2))
    return 2 * width**3 / seconds(lambda: torch.mm(left, right))


def seconds(work: Callable[[], object], repetitions: int = 20) -> float:
    """The median duration of one call on the device."""
    if IS_DRY:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    for _ in range(3):
        work()
    marks = [(mark(), mark()) for _ in range(repetitions)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(elapsed_s(start, end) for start, end in marks)


def mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def elapsed_s(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


def replayed_seconds(work: Callable[[int], object], variants: int) -> float:
    """The duration of one call among many in a recorded graph, without the cost of launching it. `work` is told which
    set of inputs to use, so that one call does not find in the cache what the one before it read."""
    if IS_DRY:
        return seconds(lambda: work(0))
    for variant in range(variants):
        work(variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for variant in range(variants):
            work(variant)
    return seconds(graph.replay, repetitions=10) / variants


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """||actual - reference|| / ||reference|| in float64; infinite if anything is not finite."""
    difference = (actual.double() - reference.double()).norm() / reference.double().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
