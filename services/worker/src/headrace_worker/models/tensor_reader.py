"""Checked parts of a checkpoint's tensors, put where the model wants them."""

import torch
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.models.rotary import neighbours
from headrace_worker.models.weights import TensorSource

MOST_ELEMENTS = 1 << 24
"""Read at a time: bounds what is in memory beside the result, in the stored type and in float32."""


class TensorReader:
    """Reads to `device` in the stored type, and computes and rounds to `dtype` there. One that `only_checks` reads
    nothing and leaves its tensors as they happen to be."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, *, only_checks: bool = False
    ) -> None:
        self._source = source
        self._only_checks = only_checks
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def fill(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: range | None = None,
        columns: range | None = None,
        norm: Tensor | None = None,
        rotated: int | None = None,
    ) -> None:
        """Fills `out` with those rows and columns of a tensor that has `shape`, each row multiplied by `norm`.
        `rotated`: the rows are heads of this size, whose pairs become neighbours.

        Raises ConfigError if there is no such tensor, or one of another shape."""
        self._check(name, shape)
        if self._only_checks:
            return
        rows = range(shape[0]) if rows is None else rows
        step = max(1, MOST_ELEMENTS * len(rows) // max(1, out.numel()))
        for start in range(0, len(rows), step):
            part = self._source.read(name, rows[start : start + step], columns).to(self._device)
            place = out[start : start + step]
            place.copy_(part if norm is None else part.to(torch.float32) * norm)
        if rotated is not None:
            out.copy_(neighbours(out, rotated))

    def norm(self, name: str, size: int, offset: float) -> Tensor:
        """The weight plus `offset`, [size], float32"""
        self._check(name, (size,))
        if self._only_checks:
            # No arithmetic: with the sizes alone torch does it in Python, for which it loads its compiler.
            return torch.empty(size, device=self._device)
        return self._source.read(name).to(self._device, torch.float32) + offset

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._source:
            raise ConfigError("model", f"the checkpoint lacks {name}")
        if (actual := self._source.shape(name)) != shape:
            raise ConfigError("model", f"{name} has the shape {actual}, not {shape}")
