"""What the engine keeps on the host of one sequence: how it is sampled."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import Admission, SamplingParams, SequenceId
from headrace_worker.constraint import Limit
from headrace_worker.sampling import GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class DeviceSequence:
    sequence_id: SequenceId
    choice: int
    params: SamplingParams
    is_greedy: bool
    num_prompt: int
    min_tokens: int
    stop_ids: NDArray[np.int64]
    """Tokens that must not be drawn before `min_tokens` have been."""
    biased: NDArray[np.int64]
    bias: NDArray[np.float32]
    constraint: Limit | None
    slot: int | None
    """Of the sampler, for what it keeps on the device; None: nothing."""

    @property
    def is_special(self) -> bool:
        """More than temperature and filters has to be looked at when a token is drawn."""
        return (
            self.slot is not None
            or self.biased.size > 0
            or self.params.num_logprobs is not None
            or (self.min_tokens > 0 and self.stop_ids.size > 0)
        )


def penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def device_sequence(
    admission: Admission, vocab_size: int, slot: int | None, constraint: Limit | None = None
) -> DeviceSequence:
    request = admission.request
    params = request.sampling
    bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
    return DeviceSequence(
        sequence_id=admission.sequence_id,
        choice=admission.choice,
        params=params,
        is_greedy=params.temperature <= GREEDY_TEMPERATURE,
        num_prompt=len(request.prompt) // 4,
        min_tokens=request.stop.min_tokens,
        stop_ids=np.array([token for token in request.stop.stop_token_ids if token < vocab_size], dtype=np.int64),
        biased=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        constraint=constraint,
        slot=slot,
    )


def unsampled(sequence_id: SequenceId) -> DeviceSequence:
    """A sequence that only logits are wanted of."""
    nothing = np.empty(0, dtype=np.int64)
    params = SamplingParams(seed=0, temperature=0.0)
    return DeviceSequence(sequence_id, 0, params, True, 0, 0, nothing, nothing, nothing.astype(np.float32), None, None)


def seen_tokens(
    admission: Admission, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(distinct tokens of the prompt, distinct tokens of the output, how often each of those occurs)."""
    prompt = np.unique(np.asarray(unpack_ids(admission.request.prompt), dtype=np.int64))
    output = np.asarray(unpack_ids(admission.output), dtype=np.int64)
    tokens, counts = np.unique(output, return_counts=True)
    return prompt[prompt < vocab_size], tokens, counts
