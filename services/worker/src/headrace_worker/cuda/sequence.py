"""What the engine keeps on the host of one sequence: how it is sampled."""

from dataclasses import dataclass

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
    constraint: Limit | None
    slot: int | None
    """Of the sampler, for what it keeps on the device; None: nothing."""


def device_sequence(admission: Admission, slot: int | None, constraint: Limit | None = None) -> DeviceSequence:
    params = admission.request.sampling
    return DeviceSequence(
        sequence_id=admission.sequence_id,
        choice=admission.choice,
        params=params,
        is_greedy=params.temperature <= GREEDY_TEMPERATURE,
        num_prompt=len(admission.request.prompt) // 4,
        constraint=constraint,
        slot=slot,
    )


def unsampled(sequence_id: SequenceId) -> DeviceSequence:
    """A sequence that only logits are wanted of."""
    params = SamplingParams(seed=0, temperature=0.0)
    return DeviceSequence(sequence_id, 0, params, True, 0, constraint=None, slot=None)
