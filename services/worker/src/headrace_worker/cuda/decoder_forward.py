"""A decoder as the engine's forward pass."""

from typing import Protocol

from torch import Tensor

from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.models.decoder import Decoder
from headrace_worker.models.operations import Attend


class DeviceAttention(Protocol):
    """Attention over one cache, which it also writes to."""

    def prepare(self, batch: DeviceBatch) -> Attend:
        """What is the same in all layers is computed here. Bound by the same rule as `DeviceForward`."""
        ...


class DecoderForward:
    """A `DeviceForward` of a whole model or one tensor-parallel rank of it: there is one pipeline stage."""

    def __init__(self, decoder: Decoder, attention: DeviceAttention) -> None:
        self._decoder = decoder
        self._attention = attention

    def __call__(self, batch: DeviceBatch) -> Tensor:
        attend = self._attention.prepare(batch)
        hidden = self._decoder.run(self._decoder.embed(batch.token_ids), batch.positions, attend, batch.adapters)
        return finish(self._decoder, hidden, batch)


def finish(decoder: Decoder, hidden: Tensor, batch: DeviceBatch) -> Tensor:
    """What the last stage makes of the hidden states [tokens, hidden_size]."""
    if batch.hidden is not None:
        batch.hidden.copy_(decoder.normalized(hidden[batch.hidden_rows]))
    return decoder.logits(hidden if batch.sampled_rows is None else hidden[batch.sampled_rows])
