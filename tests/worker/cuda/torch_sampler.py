"""Sampling with torch alone, without waiting for the device: what the sampling kernels are compared with."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission, SequenceId
from headrace_worker.cuda.device import Device
from headrace_worker.cuda.frame import Frame
from headrace_worker.cuda.sampler import Draw, Preparation, Sampled, Wanted, to_host
from headrace_worker.cuda.sequence import DeviceSequence, device_sequence
from headrace_worker.cuda.tail import Tail
from headrace_worker.penalties import penalizes
from tests.worker.cuda.draw import SEEN_IN_PROMPT, adjust, best, draw, penalize


class _Plan(NamedTuple):
    """What one iteration's sampling consists of. Numbers of arrays in the tail where they are `int | None`."""

    sequence_ids: list[SequenceId]
    is_random: bool
    filters: bool
    adjustments: tuple[int, int, int] | None = None
    """(rows, tokens, values)"""
    penalties: tuple[int, int, int] | None = None
    """(rows, rows of the counts, repetition then presence then frequency)"""
    logprob_rows: int | None = None
    wanted: tuple[Wanted, ...] = ()


class _Special(NamedTuple):
    """More of a sequence than temperature and filters has to be looked at when a token is drawn."""

    min_tokens: int
    stop_ids: NDArray[np.int64]
    """Tokens that must not be drawn before `min_tokens` have been."""
    biased: NDArray[np.int64]
    bias: NDArray[np.float32]


class TorchSampler:
    """A `DeviceSampler`."""

    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device.torch_device)
        """A row for each sequence with penalties; grows, so nothing that is recorded may use it."""
        self._num_counts = 0
        self._free_counts: list[int] = []
        self._fresh: list[tuple[int, NDArray[np.int64], NDArray[np.int32]]] = []
        self._special: dict[SequenceId, _Special] = {}

    def add(self, admission: Admission) -> DeviceSequence:
        row = None
        if penalizes(admission.request.sampling):
            if self._free_counts:
                row = self._free_counts.pop()
            else:
                row, self._num_counts = self._num_counts, self._num_counts + 1
            prompt, output, counts = _seen_tokens(admission, self._vocab_size)
            tokens = np.concatenate([prompt, output])
            values = np.concatenate([np.full(prompt.shape[0], SEEN_IN_PROMPT), counts]).astype(np.int32)
            self._fresh.append((row, tokens, values))
        special = _special(admission, self._vocab_size, has_penalties=row is not None)
        if special is not None:
            self._special[admission.sequence_id] = special
        return device_sequence(admission, row)

    def remove(self, sequence: DeviceSequence) -> None:
        self._special.pop(sequence.sequence_id, None)
        if sequence.slot is not None:
            self._free_counts.append(sequence.slot)

    def preparations(self, tail: Tail) -> list[Preparation]:
        if not self._fresh:
            return []
        rows = np.array([row for row, _, _ in self._fresh], dtype=np.int64)
        indices = np.concatenate([row * self._vocab_size + tokens for row, tokens, _ in self._fresh])
        values = np.concatenate([values for _, _, values in self._fresh])
        self._fresh.clear()
        return [(self._set_counts, (tail.put(rows), tail.put(indices), tail.put(values)))]

    def _set_counts(self, rows: Tensor, indices: Tensor, values: Tensor) -> None:
        if self._counts.shape[0] < self._num_counts:
            grown = self._counts.new_zeros((max(8, 2 * self._num_counts), self._vocab_size))
            grown[: self._counts.shape[0]] = self._counts
            self._counts = grown
        self._counts.index_fill_(0, rows, 0)
        self._counts.view(-1).index_put_((indices,), values, accumulate=True)

    def plan(
        self,
        sequences: Sequence[DeviceSequence],
        num_output: NDArray[np.int64],
        frame: Frame[NDArray[Any]],
        tail: Tail,
    ) -> Draw:
        count = len(sequences)
        is_random = bool((frame.temperatures[:count] > 0.0).any())
        filters = is_random and bool((frame.top_ks[:count] > 0).any() or (frame.top_ps[:count] < 1.0).any())
        plan = _Plan([sequence.sequence_id for sequence in sequences], is_random, filters)
        special = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sequence_id in self._special]
        return partial(self._sample, self._with_special(plan, special, num_output, tail) if special else plan)

    def _with_special(
        self,
        plan: _Plan,
        special: list[tuple[int, DeviceSequence]],
        num_output: NDArray[np.int64],
        tail: Tail,
    ) -> _Plan:
        rows: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        for row, sequence in special:
            own = self._special[sequence.sequence_id]
            pieces = [(own.biased, own.bias)]
            if num_output[row] < own.min_tokens:
                pieces.append((own.stop_ids, np.full(own.stop_ids.shape, -np.inf, dtype=np.float32)))
            for ids, changes in pieces:
                rows.append(np.full(ids.shape, row, dtype=np.int64))
                tokens.append(ids)
                values.append(changes)
        penalized = [(row, sequence) for row, sequence in special if sequence.slot is not None]
        wanting = [
            (row, sequence.params.num_logprobs) for row, sequence in special if sequence.params.num_logprobs is not None
        ]
        penalties = None
        if penalized:
            factors = [
                (one.params.repetition_penalty, one.params.presence_penalty, one.params.frequency_penalty)
                for _, one in penalized
            ]
            penalties = (
                tail.put(np.array([row for row, _ in penalized], dtype=np.int64)),
                tail.put(np.array([one.slot for _, one in penalized], dtype=np.int64)),
                tail.put(np.array(factors, dtype=np.float32).T.copy()),
            )
        adjustments = None
        if sum(ids.size for ids in tokens):
            adjustments = (
                tail.put(np.concatenate(rows)),
                tail.put(np.concatenate(tokens)),
                tail.put(np.concatenate(values)),
            )
        return plan._replace(
            adjustments=adjustments,
            penalties=penalties,
            logprob_rows=tail.put(np.array([row for row, _ in wanting], dtype=np.int64)) if wanting else None,
            wanted=tuple(Wanted(row, place, number) for place, (row, number) in enumerate(wanting)),
        )

    def _sample(
        self, plan: _Plan, logits: Tensor, frame: Frame[Tensor], extras: Sequence[Tensor], last_tokens: Tensor
    ) -> Sampled:
        count = logits.shape[0]
        tokens, is_finite = best(logits)
        wanted = None if plan.logprob_rows is None else extras[plan.logprob_rows]
        raw = None if wanted is None else F.log_softmax(logits[wanted].float(), dim=-1)
        if plan.is_random or plan.adjustments is not None or plan.penalties is not None:
            tokens = self._drawn(logits.to(torch.float32, copy=True), plan, frame, extras)
        last_tokens.index_copy_(0, frame.sampled_places[:count], tokens)
        own = top_ids = top_values = None
        if raw is not None and wanted is not None:
            own = to_host(self._device, raw.gather(-1, tokens[wanted][:, None]).squeeze(-1))
            most = max(1, *(one.num_alternatives for one in plan.wanted))
            top_values, top_ids = (to_host(self._device, values) for values in raw.topk(most, dim=-1))
        return Sampled(
            plan.sequence_ids,
            to_host(self._device, tokens),
            to_host(self._device, is_finite),
            plan.wanted,
            own,
            top_ids,
            top_values,
            self._device.mark(),
        )

    def _drawn(self, scores: Tensor, plan: _Plan, frame: Frame[Tensor], extras: Sequence[Tensor]) -> Tensor:
        count = scores.shape[0]
        if plan.penalties is not None:
            rows, slots, factors = (extras[number] for number in plan.penalties)
            penalize(scores, rows, self._counts[slots], *factors.view(3, -1, 1))
        if plan.adjustments is not None:
            adjust(scores, *(extras[number] for number in plan.adjustments))
        tokens = draw(
            scores,
            frame.temperatures[:count],
            frame.top_ks[:count],
            frame.top_ps[:count],
            frame.min_ps[:count],
            frame.keys[:count],
            filters=plan.filters,
        )
        if plan.penalties is not None:
            self._counts.index_put_((slots, tokens[rows]), torch.ones_like(rows, dtype=torch.int32), accumulate=True)
        return tokens


def _special(admission: Admission, vocab_size: int, *, has_penalties: bool) -> _Special | None:
    params, stop = admission.request.sampling, admission.request.stop
    bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
    stop_ids = [token for token in stop.stop_token_ids if token < vocab_size]
    if not (has_penalties or bias or params.num_logprobs is not None or (stop.min_tokens and stop_ids)):
        return None
    return _Special(
        stop.min_tokens,
        np.array(stop_ids, dtype=np.int64),
        np.fromiter(bias.keys(), np.int64, len(bias)),
        np.fromiter(bias.values(), np.float32, len(bias)),
    )


def _seen_tokens(
    admission: Admission, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(distinct tokens of the prompt, distinct tokens of the output, how often each of those occurs)."""
    prompt = np.unique(np.asarray(unpack_ids(admission.request.prompt), dtype=np.int64))
    output = np.asarray(unpack_ids(admission.output), dtype=np.int64)
    tokens, counts = np.unique(output, return_counts=True)
    return prompt[prompt < vocab_size], tokens, counts
