"""Rows of the device's tables, and who has them: block tables and what sampling must know of a sequence.

A sequence gets a place when it first takes part in an iteration. There are enough for two iterations, the one being
composed and the one in flight; beyond that the sequence that has waited longest loses its place and is written anew
when it runs again. So the tables never grow, and recorded work finds them where they were.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_shared.messages import BlockId, SequenceId
from headrace_worker.cuda.sequence import DeviceSequence


class Entries(NamedTuple):
    """Changes of the flattened block tables."""

    indices: NDArray[np.int64]
    block_ids: NDArray[np.int32]


class Places:
    """The host's side. Place `null_place` belongs to nobody: its table is all null block, for padding."""

    def __init__(self, max_sequences: int, *, blocks_per_sequence: int, null_block: int) -> None:
        self.null_place = 2 * max_sequences + 1
        self.num_places = self.null_place + 1
        self.tables = np.full((self.num_places, blocks_per_sequence), null_block, dtype=np.int32)
        """int32 [num_places, blocks_per_sequence]; the device's copy is kept equal by `take_entries`."""
        self.num_prompts = np.zeros(self.num_places, dtype=np.int64)
        self.temperatures = np.zeros(self.num_places, dtype=np.float32)
        """0: greedy."""
        self.top_ks = np.zeros(self.num_places, dtype=np.int32)
        self.top_ps = np.ones(self.num_places, dtype=np.float32)
        self.min_ps = np.zeros(self.num_places, dtype=np.float32)
        self.seeds = np.zeros(self.num_places, dtype=np.uint64)
        self.choices = np.zeros(self.num_places, dtype=np.uint64)
        self._width = blocks_per_sequence
        self._num_known = [0] * self.num_places
        self._of: OrderedDict[SequenceId, int] = OrderedDict()
        self._free = list(range(self.null_place))
        self._changed: list[tuple[int, int, int]] = []

    def take(self, sequence: DeviceSequence, block_ids: Sequence[BlockId]) -> int:
        """The place of a sequence in the iteration being composed; notes the blocks that it has gained."""
        place = self._of.get(sequence.sequence_id)
        if place is None:
            place = self._assign(sequence)
        else:
            self._of.move_to_end(sequence.sequence_id)
        known, count = self._num_known[place], min(len(block_ids), self._width)
        if count > known:
            self.tables[place, known:count] = block_ids[known:count]
            self._num_known[place] = count
            self._changed.append((place, known, count))
        return place

    def leave(self, sequence_id: SequenceId) -> None:
        place = self._of.pop(sequence_id, None)
        if place is not None:
            self._free.append(place)

    def take_entries(self) -> Entries | None:
        """What has changed in the tables since the last call."""
        if not self._changed:
            return None
        indices = np.concatenate(
            [np.arange(place * self._width + start, place * self._width + end) for place, start, end in self._changed]
        )
        self._changed.clear()
        return Entries(indices, self.tables.reshape(-1)[indices])

    def _assign(self, sequence: DeviceSequence) -> int:
        # The one that waited longest is not in the iteration in flight: that and this one have fewer than all places.
        place = self._free.pop() if self._free else self._of.popitem(last=False)[1]
        self._of[sequence.sequence_id] = place
        self._num_known[place] = 0
        params = sequence.params
        self.num_prompts[place] = sequence.num_prompt
        self.temperatures[place] = 0.0 if sequence.is_greedy else params.temperature
        self.top_ks[place] = params.top_k
        self.top_ps[place] = params.top_p
        self.min_ps[place] = params.min_p
        self.seeds[place] = params.seed
        self.choices[place] = sequence.choice
        return place
