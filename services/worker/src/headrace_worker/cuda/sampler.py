"""Samples on the device: what has to be done for an iteration is decided on the host beforehand, and what was drawn
stays on the device for the next iteration, and goes to the host behind it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.messages import Admission, SequenceId, TokenLogprobs, TopLogprob
from headrace_worker.cuda.device import Device, Mark
from headrace_worker.cuda.draw import SEEN_IN_PROMPT, adjust, best, draw, penalize
from headrace_worker.cuda.frame import Frame
from headrace_worker.cuda.sequence import DeviceSequence, device_sequence, penalizes, seen_tokens
from headrace_worker.cuda.tail import Tail
from headrace_worker.iteration import SampledToken
from headrace_worker.sampling import NOT_FINITE


class SamplingPlan(NamedTuple):
    """What one iteration's sampling consists of. Numbers of arrays in the tail where they are `int | None`."""

    sequence_ids: list[SequenceId]
    """Of the sampled slices, in order."""
    is_random: bool
    filters: bool
    adjustments: tuple[int, int, int] | None
    """(rows, tokens, values)"""
    penalties: tuple[int, int, int] | None
    """(rows, rows of the counts, repetition then presence then frequency)"""
    logprob_rows: int | None
    num_logprobs: list[tuple[int, int]]
    """(row, how many alternatives) of those that want log-probabilities."""


class Sampled(NamedTuple):
    """An iteration's results on their way to the host."""

    plan: SamplingPlan
    drawn: Tensor
    """int32 [2, R]: tokens, and whether their logits were finite."""
    own: Tensor
    """float32 [n]: log-probabilities of the drawn tokens."""
    top_ids: Tensor
    """int32 [n, k]"""
    top_values: Tensor
    """float32 [n, k]"""
    mark: Mark


class Sampler:
    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device.torch_device)
        """A row for each sequence with penalties; grows, so nothing that is recorded may use it."""
        self._num_counts = 0
        self._free_counts: list[int] = []
        self._fresh: list[tuple[int, NDArray[np.int64], NDArray[np.int32]]] = []

    def add(self, admission: Admission) -> DeviceSequence:
        row = None
        if penalizes(admission.request.sampling):
            if self._free_counts:
                row = self._free_counts.pop()
            else:
                row, self._num_counts = self._num_counts, self._num_counts + 1
            prompt, output, counts = seen_tokens(admission, self._vocab_size)
            tokens = np.concatenate([prompt, output])
            values = np.concatenate([np.full(prompt.shape[0], SEEN_IN_PROMPT), counts]).astype(np.int32)
            self._fresh.append((row, tokens, values))
        return device_sequence(admission, self._vocab_size, row)

    def remove(self, sequence: DeviceSequence) -> None:
        if sequence.counts_row is not None:
            self._free_counts.append(sequence.counts_row)

    def put_fresh(self, tail: Tail) -> tuple[int, int, int] | None:
        """The counts of sequences added since the last call, for `set_fresh`."""
        if not self._fresh:
            return None
        rows = np.array([row for row, _, _ in self._fresh], dtype=np.int64)
        indices = np.concatenate([row * self._vocab_size + tokens for row, tokens, _ in self._fresh])
        values = np.concatenate([values for _, _, values in self._fresh])
        self._fresh.clear()
        return tail.put(rows), tail.put(indices), tail.put(values)

    def set_fresh(self, rows: Tensor, indices: Tensor, values: Tensor) -> None:
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
        frame: Frame[NDArray[np.float32]],
        tail: Tail,
    ) -> SamplingPlan:
        """`sequences` of the sampled slices, `num_output` tokens drawn for each before; `frame` of the host."""
        count = len(sequences)
        is_random = bool((frame.temperatures[:count] > 0.0).any())
        filters = is_random and bool((frame.top_ks[:count] > 0).any() or (frame.top_ps[:count] < 1.0).any())
        plan = SamplingPlan([sequence.sequence_id for sequence in sequences], is_random, filters, None, None, None, [])
        special = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.is_special]
        return self._with_special(plan, special, num_output, tail) if special else plan

    def _with_special(
        self,
        plan: SamplingPlan,
        special: list[tuple[int, DeviceSequence]],
        num_output: NDArray[np.int64],
        tail: Tail,
    ) -> SamplingPlan:
        rows: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int64]] = []
        values: list[NDArray[np.float32]] = []
        for row, sequence in special:
            pieces = [(sequence.biased, sequence.bias)]
            if num_output[row] < sequence.min_tokens:
                pieces.append((sequence.stop_ids, np.full(sequence.stop_ids.shape, -np.inf, dtype=np.float32)))
            for ids, changes in pieces:
                rows.append(np.full(ids.shape, row, dtype=np.int64))
                tokens.append(ids)
                values.append(changes)
        penalized = [(row, sequence) for row, sequence in special if sequence.counts_row is not None]
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
                tail.put(np.array([one.counts_row for _, one in penalized], dtype=np.int64)),
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
            num_logprobs=wanting,
        )

    def sample(
        self, logits: Tensor, plan: SamplingPlan, frame: Frame[Tensor], extras: Sequence[Tensor], last_tokens: Tensor
    ) -> Sampled:
        """logits [R, vocab_size]; `frame` and `extras` (the tail) of the device. Keeps the drawn tokens in
        `last_tokens` [places], and sets them on their way to the host."""
        count = logits.shape[0]
        tokens, is_finite = best(logits)
        wanted = None if plan.logprob_rows is None else extras[plan.logprob_rows]
        raw = None if wanted is None else F.log_softmax(logits[wanted].float(), dim=-1)
        if plan.is_random or plan.adjustments is not None or plan.penalties is not None:
            tokens = self._drawn(logits.to(torch.float32, copy=True), plan, frame, extras)
        last_tokens.index_copy_(0, frame.sampled_places[:count], tokens)
        own = top_ids = top_values = tokens.new_empty(0, dtype=torch.float32)
        if raw is not None and wanted is not None:
            own = raw.gather(-1, tokens[wanted][:, None]).squeeze(-1)
            top_values, top_ids = raw.topk(max(1, *(number for _, number in plan.num_logprobs)), dim=-1)
        drawn = torch.stack([tokens, is_finite.long()]).int()
        return Sampled(
            plan,
            self._to_host(drawn),
            self._to_host(own),
            self._to_host(top_ids.int()),
            self._to_host(top_values),
            self._device.mark(),
        )

    def _drawn(self, scores: Tensor, plan: SamplingPlan, frame: Frame[Tensor], extras: Sequence[Tensor]) -> Tensor:
        count = scores.shape[0]
        if plan.penalties is not None:
            rows, counts_rows, factors = (extras[number] for number in plan.penalties)
            penalize(scores, rows, self._counts[counts_rows], *factors.view(3, -1, 1))
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
            self._counts.index_put_(
                (counts_rows, tokens[rows]), torch.ones_like(rows, dtype=torch.int32), accumulate=True
            )
        return tokens

    def _to_host(self, values: Tensor) -> Tensor:
        if not values.numel():
            return values
        staging = self._device.staging(values.numel()).view(values.dtype).view(values.shape)
        staging.copy_(values, non_blocking=True)
        return staging


def results(sampled: Sampled) -> list[SampledToken]:
    """Waits until they have come."""
    sampled.mark.wait()
    plan = sampled.plan
    tokens, finite = sampled.drawn.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if plan.num_logprobs:
        rows = zip(
            plan.num_logprobs, sampled.own.tolist(), sampled.top_ids.tolist(), sampled.top_values.tolist(), strict=True
        )
        for (row, number), own, ids, values in rows:
            top = zip(ids[:number], values[:number], strict=True)
            logprobs[row] = TokenLogprobs(own, tuple(TopLogprob(token, value) for token, value in top))
    return [
        SampledToken(sequence_id, token, logprobs.get(row) if is_finite else None, None if is_finite else NOT_FINITE)
        for row, (sequence_id, token, is_finite) in enumerate(zip(plan.sequence_ids, tokens, finite, strict=True))
    ]
