"""One rank's part of a forward pass on an asynchronous device: as `stage_forward`, but everything is only queued."""

import torch
from torch import Tensor

from headrace_worker.cuda.decoder_forward import DeviceAttention, finish
from headrace_worker.cuda.forward import DeviceBatch
from headrace_worker.models.decoder import Decoder
from headrace_worker.parallel.torch_group import TorchGroup


class DeviceStage:
    """A `DeviceForward` that returns logits in the last stage, and in the others nothing of use to the caller."""

    def __init__(self, decoder: Decoder, attention: DeviceAttention, group: TorchGroup, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._attention = attention
        self._group = group
        self._dtype = dtype

    def __call__(self, batch: DeviceBatch) -> Tensor:
        decoder, shard = self._decoder, self._decoder.shard
        attend = self._attention.prepare(batch)
        if shard.is_first:
            hidden = decoder.embed(batch.token_ids)
        else:
            shape = (batch.token_ids.shape[0], decoder.config.hidden_size)
            hidden = torch.empty(shape, dtype=self._dtype, device=batch.token_ids.device)
            self._group.receive(hidden)
        hidden = decoder.run(hidden, batch.positions, attend)
        if shard.is_last:
            return finish(decoder, hidden, batch)
        self._group.send(hidden)
        return hidden
