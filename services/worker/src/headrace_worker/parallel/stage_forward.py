"""One rank's part of a forward pass, between what the stage before sends and what the next one waits for."""

import torch
from torch import Tensor

from headrace_worker.adapters.weights import AdapterWeights
from headrace_worker.forward import TorchForward
from headrace_worker.inputs import Inputs
from headrace_worker.parallel.torch_group import TorchGroup


class StageForward:
    """A `forward.Forward` that returns logits in the last stage, and in the others nothing of use to the caller."""

    kernels = None

    def __init__(
        self, forward: TorchForward, group: TorchGroup, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._forward = forward
        self._group = group
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device

    @property
    def gathered_positions(self) -> int:
        return self._forward.gathered_positions

    @property
    def reads_unwritten(self) -> bool:
        return self._forward.reads_unwritten

    @property
    def folds_norms(self) -> bool:
        return self._forward.folds_norms

    def set_adapter(self, slot: int, adapter: AdapterWeights | None) -> None:
        raise NotImplementedError("adapters are for engines of one rank")

    def greedy(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor | None:
        return None

    def __call__(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        given = None
        if not self._group.shard.is_first:
            shape = (inputs.token_ids.shape[0], self._hidden_size)
            given = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._group.receive(given)
        output = self._forward.stage(inputs, given, hidden)
        if not self._group.shard.is_last:
            self._group.send(output)
        return output
