"""Embeddings of prompts: the mean of the last hidden states (after the last norm) over all tokens, at unit length.

The sum grows with each chunk of the prompt, so that it does not matter how it is cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_shared.messages import Admission, SequenceId
from headrace_worker.iteration import SequenceSlice
from headrace_worker.models.config import ModelConfig
from headrace_worker.models.weights import TensorSource


class Pooling:
    """Of one engine's sequences that want it."""

    def __init__(self, hidden_size: int, norm: Tensor | None, device: torch.device) -> None:
        """`norm`: weight [hidden_size] of the last norm, where the hidden states come without it."""
        self.hidden_size = hidden_size
        self._norm = norm
        self._device = device
        self._sums: dict[SequenceId, Tensor] = {}

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sums

    def add(self, admission: Admission) -> None:
        """One that wants none is not noted."""
        if admission.request.embeds:
            sum_ = torch.zeros(self.hidden_size, dtype=torch.float32, device=self._device)
            self._sums[admission.sequence_id] = sum_

    def remove(self, sequence_id: SequenceId) -> None:
        self._sums.pop(sequence_id, None)

    def wanted(self, slices: Sequence[SequenceSlice]) -> list[bool] | None:
        """Whose hidden states are wanted; None: nobody's."""
        if not self._sums:
            return None
        wanted = [piece.sequence_id in self._sums for piece in slices]
        return wanted if any(wanted) else None

    def take(self, slices: Sequence[SequenceSlice], hidden: Tensor) -> None:
        """hidden [rows of the wanted slices, hidden_size], float32, in slice order."""
        start = 0
        for piece in slices:
            if (total := self._sums.get(piece.sequence_id)) is not None:
                total += hidden[start : start + piece.num_tokens].sum(dim=0)
                start += piece.num_tokens

    def embedding(self, sequence_id: SequenceId) -> Tensor:
        """[hidden_size] float32, of length 1 (or 0 throughout). Only queues work."""
        direction = self._sums[sequence_id]
        if self._norm is not None:
            direction = direction * self._norm
        length: Tensor = torch.linalg.vector_norm(direction)
        return direction / length.clamp_min(torch.finfo(torch.float32).tiny)


def last_norm(config: ModelConfig, source: TensorSource) -> Tensor:
    """Weight of the model's last norm, [hidden_size] float32."""
    return source.read("model.norm.weight").float() + config.norm_offset


def packed(embedding: Tensor) -> bytes:
    """32-bit floats, little-endian, of a tensor on the host."""
    data: bytes = embedding.numpy().astype("<f4").tobytes()
    return data
