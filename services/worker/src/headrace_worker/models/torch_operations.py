"""The decoder's operations with torch alone: on CPUs, and wherever there are no kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_worker.models.config import Activation
from headrace_worker.models.operations import QkNorm


class TorchOperations:
    def __init__(self, epsilon: float, device: torch.device) -> None:
        self._epsilon = torch.full((1, 1), epsilon, dtype=torch.float32, device=device)

    def rms_norm(self, rows: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            rows = residual.add_(rows)
        return self._normalized(rows, weight)

    def rotate(self, qkv: Tensor, num_rotated: int, rotations: Tensor, qk_norm: QkNorm | None) -> None:
        heads = qkv[:, :num_rotated]
        if qk_norm is None:
            wide = heads.float()
        else:
            queries, keys = heads[:, : qk_norm.num_heads].float(), heads[:, qk_norm.num_heads :].float()
            wide = torch.cat([self._normalized(queries, qk_norm.queries), self._normalized(keys, qk_norm.keys)], dim=1)
        pairs = wide.view(*wide.shape[:-1], -1, 2)
        torch.view_as_complex(pairs).mul_(rotations.unsqueeze(1))
        if wide is not heads:
            heads.copy_(wide)

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def _normalized(self, values: Tensor, weight: Tensor | None) -> Tensor:
        """Over the last dimension. On CPUs faster than F.rms_norm."""
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._epsilon, norm, norm, value=1.0 / values.shape[-1]).rsqrt_()
        wide = values * scale
        return (wide if weight is None else wide * weight).to(values.dtype)
