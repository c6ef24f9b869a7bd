"""Sampling on the device: what has to be done for an iteration is decided on the host beforehand, and what was drawn
stays on the device for the next iteration, and goes to the host behind it."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_shared.messages import Admission, SequenceId, TokenLogprobs, TopLogprob
from headrace_worker.cuda.device import Device, Mark
from headrace_worker.cuda.frame import Frame
from headrace_worker.cuda.sequence import DeviceSequence
from headrace_worker.cuda.tail import Tail
from headrace_worker.iteration import SampledToken
from headrace_worker.pooling import packed
from headrace_worker.sampling import NOT_FINITE, likeliest_first


class Wanted(NamedTuple):
    """Log-probabilities of one row."""

    row: int
    place: int
    """Where they are in what `Sampled` has of them."""
    num_alternatives: int
    tokens: tuple[int, ...] = ()
    """Whose log-probabilities are wanted instead of the likeliest."""


class Sampled(NamedTuple):
    """An iteration's results on their way to the host. The tensors are the host's; they are filled when the device has
    come to the mark."""

    sequence_ids: list[SequenceId]
    """Of the rows."""
    tokens: Tensor
    """int64 [R]"""
    finite: Tensor
    """[R]; 0: the row's logits were not finite, and its token means nothing."""
    wanted: Sequence[Wanted]
    own: Tensor | None
    """float32 [n]: log-probabilities of the drawn tokens. None, like the others: nobody wants any."""
    top_ids: Tensor | None
    """int32 [n, k]"""
    top_values: Tensor | None
    """float32 [n, k]"""
    mark: Mark
    chosen: Tensor | None = None
    """float32: of the tokens that were asked for, row by row."""
    embeddings: Mapping[int, Tensor] = {}
    """float32 [hidden_size], of rows that want it."""


Draw = Callable[[Tensor, Frame[Tensor], Sequence[Tensor], Tensor], Sampled]
"""(logits [R, vocab_size], the frame and the tail's arrays on the device, last tokens by place). Keeps the drawn tokens
among the last tokens, and sets them on their way to the host."""
Preparation = tuple[Callable[..., None], tuple[int, ...]]
"""Something to queue before the forward pass, and the numbers of its arguments in the tail."""


class DeviceSampler(Protocol):
    def add(self, admission: Admission) -> DeviceSequence: ...

    def remove(self, sequence: DeviceSequence) -> None: ...

    def preparations(self, tail: Tail) -> list[Preparation]:
        """For sequences added since the last call."""
        ...

    def plan(
        self,
        sequences: Sequence[DeviceSequence],
        num_output: NDArray[np.int64],
        frame: Frame[NDArray[Any]],
        tail: Tail,
    ) -> Draw:
        """`sequences` of the sampled slices, `num_output` tokens drawn for each before; `frame` of the host, filled."""
        ...


def to_host(device: Device, values: Tensor) -> Tensor:
    """Queues a copy to the host."""
    num_words = -(-values.nbytes // 4)
    staging = device.staging(num_words).view(values.dtype)[: values.numel()].view(values.shape)
    staging.copy_(values, non_blocking=True)
    return staging


def results(sampled: Sampled) -> list[SampledToken]:
    """Waits until they have come."""
    sampled.mark.wait()
    logprobs = _logprobs(sampled) if sampled.wanted else {}
    rows = zip(sampled.sequence_ids, sampled.tokens.tolist(), sampled.finite.tolist(), strict=True)
    return [
        SampledToken(
            sequence_id,
            token,
            logprobs.get(row) if is_finite else None,
            None if is_finite else NOT_FINITE,
            packed(sampled.embeddings[row]) if row in sampled.embeddings else None,
        )
        for row, (sequence_id, token, is_finite) in enumerate(rows)
    ]


def _logprobs(sampled: Sampled) -> dict[int, TokenLogprobs]:
    assert sampled.own is not None
    own = sampled.own.tolist()
    ids = [[] for _ in own] if sampled.top_ids is None else sampled.top_ids.tolist()
    values = [[] for _ in own] if sampled.top_values is None else sampled.top_values.tolist()
    chosen = iter(() if sampled.chosen is None else sampled.chosen.tolist())
    found = {}
    for row, place, number, tokens in sampled.wanted:
        if tokens:
            top = likeliest_first(tokens, list(islice(chosen, len(tokens))))
        else:
            pairs = zip(ids[place][:number], values[place][:number], strict=True)
            top = tuple(TopLogprob(token, value) for token, value in pairs)
        found[row] = TokenLogprobs(own[place], top)
    return found
