"""Sampling by kernels. What they must know of a sequence is in a slot of a table on the device from the sequence's
first moment to its last; the table grows when it has to, so nothing that is recorded may use it."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import Admission, SequenceId
from headrace_worker.constraint import Constraints, Limit
from headrace_worker.cuda.device import Device
from headrace_worker.cuda.frame import Frame
from headrace_worker.cuda.sampler import Draw, Preparation, Sampled, Wanted, to_host
from headrace_worker.cuda.sequence import DeviceSequence, device_sequence
from headrace_worker.cuda.tail import Tail
from headrace_worker.kernels.sampling import MOST_LOGPROBS, Masks, sample
from headrace_worker.kernels.sampling_table import Need, SamplingTable

NUM_LOGPROBS = (0, 1, 5, 20, MOST_LOGPROBS)
"""What is asked for is rounded up to one of these: each number is a kernel of its own, and compiling one in service
would hold everybody up."""
NUM_MASK_THREADS = 4
"""Grammars' masks are computed on the host, while the device works on the iteration before."""


class _Plan(NamedTuple):
    sequence_ids: list[SequenceId]
    slots: int
    """Number of the rows' slots in the tail."""
    need: Need
    wanted: list[Wanted]
    masks: tuple[int, int] | None
    """Numbers of the words and the rows in the tail."""
    chosen: tuple[int, int] | None
    """Numbers of rows and tokens whose log-probabilities are asked for by name."""


class KernelSampler:
    """A `DeviceSampler`."""

    def __init__(self, device: Device, card: ModelCard, max_sequences: int) -> None:
        """`max_sequences` in one iteration; that many slots and an eighth more are there from the start."""
        self._device = device
        self._constraints = Constraints(card, NUM_MASK_THREADS)
        vocab_size = card.vocab_size
        with torch.inference_mode():
            self._table = SamplingTable(max_sequences + max_sequences // 8 + 1, vocab_size, device.torch_device)
        self._free = list(range(self._table.num_slots))
        self._needs: dict[SequenceId, Need] = {}

    @torch.inference_mode()
    def add(self, admission: Admission) -> DeviceSequence:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._needs[admission.sequence_id] = self._table.assign(slot, admission)
        return device_sequence(admission, slot, self._constraints.of(admission))

    def remove(self, sequence: DeviceSequence) -> None:
        assert sequence.slot is not None
        self._free.append(sequence.slot)
        del self._needs[sequence.sequence_id]
        if sequence.constraint is not None:
            sequence.constraint.abandon()

    def preparations(self, tail: Tail) -> list[Preparation]:
        return []

    def plan(
        self,
        sequences: Sequence[DeviceSequence],
        num_output: NDArray[np.int64],
        frame: Frame[NDArray[Any]],
        tail: Tail,
    ) -> Draw:
        slots = tail.put(np.array([sequence.slot for sequence in sequences], dtype=np.int32))
        need = Need()
        wanted: list[Wanted] = []
        for row, sequence in enumerate(sequences):
            own = self._needs[sequence.sequence_id]
            if own != need:
                need |= own
            if own.num_logprobs is not None:
                wanted.append(Wanted(row, row, own.num_logprobs, sequence.params.logprob_token_ids))
        if need.num_logprobs is not None:
            most = min(need.num_logprobs, MOST_LOGPROBS)
            rounded = next(number for number in NUM_LOGPROBS if number >= most)
            need = need._replace(num_logprobs=min(rounded, self._table.vocab_size))
        masks = self._masks(sequences, tail)
        chosen = [(one.row, token) for one in wanted for token in one.tokens]
        named = None
        if chosen:
            rows, tokens = np.array(chosen, dtype=np.int64).T.copy()
            named = tail.put(rows), tail.put(tokens)
        plan = _Plan([one.sequence_id for one in sequences], slots, need, wanted, masks, named)
        return partial(self._sample, plan)

    def _masks(self, sequences: Sequence[DeviceSequence], tail: Tail) -> tuple[int, int] | None:
        rows = np.full(len(sequences), -1, dtype=np.int32)
        found: list[Limit] = []
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None:
                rows[row] = len(found)
                found.append(sequence.constraint)
        return (tail.put(self._constraints.masks(found)), tail.put(rows)) if found else None

    def _sample(
        self, plan: _Plan, logits: Tensor, frame: Frame[Tensor], extras: Sequence[Tensor], last_tokens: Tensor
    ) -> Sampled:
        masks = None
        if plan.masks is not None:
            words, rows = plan.masks
            masks = Masks(extras[words].view(-1, -(-self._table.vocab_size // 32)), extras[rows])
        drawn = sample(logits, extras[plan.slots], self._table, plan.need, masks=masks)
        last_tokens.index_copy_(0, frame.sampled_places[: logits.shape[0]], drawn.tokens)
        chosen = None
        if plan.chosen is not None and drawn.logprobs is not None:
            # All of a row are as far from their logits.
            at, named = (extras[number] for number in plan.chosen)
            chosen = drawn.logprobs[at] + (logits[at, named].float() - logits[at, drawn.tokens[at]].float())
        own, top_ids, top_values, chosen = (
            None if values is None else to_host(self._device, values)
            for values in (drawn.logprobs, drawn.top_ids, drawn.top_logprobs, chosen)
        )
        return Sampled(
            plan.sequence_ids,
            to_host(self._device, drawn.tokens),
            to_host(self._device, drawn.finite),
            plan.wanted,
            own,
            top_ids,
            top_values,
            self._device.mark(),
            chosen,
        )

    def _grow(self) -> None:
        old = self._table
        self._table = SamplingTable(2 * old.num_slots, old.vocab_size, old.device)
        for name in ("integers", "floats", "counts", "stop_ids", "bias_ids", "biases"):
            getattr(self._table, name)[: old.num_slots] = getattr(old, name)
        self._free = list(range(old.num_slots, self._table.num_slots))
