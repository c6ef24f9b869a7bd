"""The adapters of one engine: an `iteration.AdapterSet`, and what the engine itself asks of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace_shared.messages import Admission, SequenceId
from headrace_worker.adapters.bank import AdapterBank
from headrace_worker.adapters.config import AdapterRefused
from headrace_worker.adapters.folder import read_files
from headrace_worker.adapters.grouped import NO_ADAPTER
from headrace_worker.adapters.weights import AdapterReader, AdapterWeights, digest_of
from headrace_worker.iteration import SequenceSlice

Install = Callable[[int, AdapterWeights | None], None]
"""(slot, what is there from now on). Raises MemoryError or torch's RuntimeError where there is no memory for it."""


class ReadAdapter(NamedTuple):
    digest: str
    weights: AdapterWeights


class AdapterStore:
    def __init__(self, reader: AdapterReader, install: Install, max_adapters: int) -> None:
        self._reader = reader
        self._install = install
        self._bank: AdapterBank[AdapterWeights] = AdapterBank(max_adapters)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and digest in self._bank

    def read(self, folder: str) -> ReadAdapter:
        config_data, data = read_files(Path(folder), self._reader.max_file_bytes)
        return ReadAdapter(digest_of(config_data, data), self._reader.read(config_data, data))

    def add(self, adapter: ReadAdapter) -> None:
        if adapter.digest in self._bank:
            return
        if self._bank.is_full:
            raise AdapterRefused(f"this worker holds {self._bank.max_adapters} adapters already (--max-loras)")
        slot = self._bank.put(adapter.digest, adapter.weights)
        try:
            self._install(slot, adapter.weights)
        except (MemoryError, RuntimeError) as error:
            self._bank.drop(adapter.digest)
            raise AdapterRefused(f"there is no memory for its weights: {str(error)[:200]}") from error

    def drop(self, digest: str) -> None:
        self._clear(self._bank.drop(digest))

    def use(self, admission: Admission) -> None:
        digest = admission.request.adapter_digest
        if digest:
            is_there = self._bank.use(admission.sequence_id, digest)
            assert is_there, digest

    def leave(self, sequence_id: SequenceId) -> None:
        self._clear(self._bank.leave(sequence_id))

    def slots(self, slices: Sequence[SequenceSlice]) -> list[int] | None:
        """Of each slice's adapter; None if no slice has one."""
        if not self._bank.is_in_use:
            return None
        slots = [self._bank.slot_of(piece.sequence_id) for piece in slices]
        if all(slot is None for slot in slots):
            return None
        return [NO_ADAPTER if slot is None else slot for slot in slots]

    def _clear(self, slot: int | None) -> None:
        if slot is not None:
            self._install(slot, None)
