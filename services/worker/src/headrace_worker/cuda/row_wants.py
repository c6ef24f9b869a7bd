"""Which rows of an iteration want more than logits of the model itself: an adapter, or their hidden states."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_worker.cuda.tail import Tail
from headrace_worker.iteration import SequenceSlice


class Wants(NamedTuple):
    slots: list[int] | None
    """Of each slice's adapter, below 0 for none. None: no slice has one."""
    pooled: list[bool] | None
    """Whose hidden states are wanted. None: nobody's."""


class PutRows(NamedTuple):
    """Numbers of arrays in the tail."""

    of_slots: Mapping[int, int]
    """By the adapter's slot."""
    hidden: int | None


def put_rows(tail: Tail, slices: Sequence[SequenceSlice], first_rows: NDArray[np.int64], wants: Wants) -> PutRows:
    def rows(chosen: Sequence[int]) -> NDArray[np.int64]:
        return np.concatenate([np.arange(slices[i].num_tokens) + first_rows[i] for i in chosen])

    slots = wants.slots or []
    of_slots = {
        slot: tail.put(rows([i for i, own in enumerate(slots) if own == slot]))
        for slot in sorted({slot for slot in slots if slot >= 0})
    }
    pooled = [i for i, wanted in enumerate(wants.pooled or []) if wanted]
    return PutRows(of_slots, tail.put(rows(pooled)) if pooled else None)
