"""Which adapters an engine holds, and who uses them. Pure.

Nothing is evicted: an adapter stays until it is dropped, and one that is dropped stays until the last sequence that
uses it is gone. So what is loaded is bounded, and nobody's adapter disappears under him.
"""

from typing import Generic, TypeVar

from headrace_shared.messages import SequenceId

Weights = TypeVar("Weights")


class AdapterBank(Generic[Weights]):
    """Adapters by digest, in slots 0 to `max_adapters` - 1."""

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._slots: list[Weights | None] = [None] * max_adapters
        self._slot_of: dict[str, int] = {}
        self._dropped: set[int] = set()
        self._users: list[int] = [0] * max_adapters
        self._used: dict[SequenceId, int] = {}

    def __contains__(self, digest: str) -> bool:
        """It is there for new sequences."""
        return digest in self._slot_of

    @property
    def is_full(self) -> bool:
        return all(weights is not None for weights in self._slots)

    def put(self, digest: str, weights: Weights) -> int:
        """The slot. The caller has checked that it is not full, and that the adapter is not there."""
        assert digest not in self._slot_of, digest
        slot = self._slots.index(None)
        self._slots[slot] = weights
        self._slot_of[digest] = slot
        return slot

    def drop(self, digest: str) -> int | None:
        """No new sequence gets it. The slot if it is free by that; None also if there is no such adapter."""
        slot = self._slot_of.pop(digest, None)
        if slot is None:
            return None
        self._dropped.add(slot)
        return self._freed(slot)

    def use(self, sequence_id: SequenceId, digest: str) -> bool:
        """False if there is no such adapter."""
        slot = self._slot_of.get(digest)
        if slot is None:
            return False
        self._used[sequence_id] = slot
        self._users[slot] += 1
        return True

    def leave(self, sequence_id: SequenceId) -> int | None:
        """The sequence is gone. The slot that is free by that."""
        slot = self._used.pop(sequence_id, None)
        if slot is None:
            return None
        self._users[slot] -= 1
        return self._freed(slot)

    def slot_of(self, sequence_id: SequenceId) -> int | None:
        """None: it uses none."""
        return self._used.get(sequence_id)

    def weights(self, slot: int) -> Weights:
        weights = self._slots[slot]
        assert weights is not None, slot
        return weights

    @property
    def is_in_use(self) -> bool:
        """Some sequence has an adapter."""
        return bool(self._used)

    def _freed(self, slot: int) -> int | None:
        if slot not in self._dropped or self._users[slot]:
            return None
        self._dropped.discard(slot)
        self._slots[slot] = None
        return slot
