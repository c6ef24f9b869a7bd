"""Log-probabilities of a prompt's tokens on the device: queued behind the forward pass, and brought to the host."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.cuda.device import Device
from headrace_worker.cuda.sampler import to_host
from headrace_worker.cuda.tail import Tail
from headrace_worker.iteration import SampledToken, SequenceSlice
from headrace_worker.scoring import Scores, Targets, score


class Scored(NamedTuple):
    """An iteration's scores on their way to the host: filled when the device has come to a mark behind them."""

    targets: Targets
    parts: list[Scores]

    def items(self) -> list[SampledToken]:
        return self.targets.items(self.parts)


class Scoring(NamedTuple):
    """Numbers of arrays in the tail."""

    rows: int
    """That logits are wanted of."""
    targets: int

    def score(self, logits: Tensor, extras: Sequence[Tensor], targets: Targets, device: Device) -> Scored:
        """`logits` of the rows."""
        parts = score(logits, extras[self.targets], targets.most)
        return Scored(targets, [Scores(*(to_host(device, values) for values in part)) for part in parts])


def plan_scoring(slices: Sequence[SequenceSlice], first_rows: NDArray[np.int64], tail: Tail) -> Scoring | None:
    """`first_rows` of the slices. None: no slice has targets."""
    scored = [(piece, first_row) for piece, first_row in zip(slices, first_rows.tolist(), strict=True) if piece.targets]
    if not scored:
        return None
    rows = [np.arange(first_row, first_row + len(piece.targets)) for piece, first_row in scored]
    targets = [np.asarray(piece.targets, dtype=np.int64) for piece, _ in scored]
    return Scoring(tail.put(np.concatenate(rows)), tail.put(np.concatenate(targets)))
