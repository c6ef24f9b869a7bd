"""Adapters applied to the rows of one iteration: the rows of each adapter are gathered, multiplied, and added back.

So an iteration costs the model's own products once for all rows, and two narrow ones for each adapter in it (Chen et
al., 2023, call it a segmented gather). Nothing is read or written of rows without an adapter.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_worker.adapters.weights import AdapterWeights
from headrace_worker.models.operations import Site

NO_ADAPTER = -1


class RowGroup(NamedTuple):
    rows: Tensor
    """int64 [n], on the device of the weights."""
    adapter: AdapterWeights


class GroupedAdapters:
    """`operations.RowAdapters`. Nothing in it depends on what tensors contain, so that it only queues work."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._groups = groups

    def add(self, layer: int, site: Site, inputs: Tensor, outputs: Tensor) -> None:
        for rows, adapter in self._groups:
            pair = adapter.layers[layer][site]
            if pair is None:
                continue
            inner = (inputs.index_select(0, rows) @ pair.a.T) * adapter.scale
            start = 0
            for number, b in enumerate(pair.b):
                end = start + b.shape[0]
                own = inner[:, number * adapter.rank : (number + 1) * adapter.rank]
                outputs[:, start:end].index_add_(0, rows, own @ b.T)
                start = end


def rows_by_slot(slots: NDArray[np.int32]) -> Mapping[int, NDArray[np.int64]]:
    """slots: of each row, NO_ADAPTER for none -> the rows of each."""
    return {int(slot): np.flatnonzero(slots == slot) for slot in np.unique(slots[slots >= 0])}
