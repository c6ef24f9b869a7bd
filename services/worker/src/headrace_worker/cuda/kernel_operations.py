"""The decoder's operations as Triton kernels. See `models.operations.Operations`."""

from torch import Tensor

from headrace_worker.kernels.rotary import rotate
from headrace_worker.kernels.rows import act_mul, rms_norm
from headrace_worker.models.config import Activation
from headrace_worker.models.operations import QkNorm


class KernelOperations:
    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def rms_norm(self, rows: Tensor, weight: Tensor | None, residual: Tensor | None = None) -> Tensor:
        return rms_norm(rows, weight, epsilon=self._epsilon, residual=residual)

    def rotate(self, qkv: Tensor, num_rotated: int, rotations: Tensor, qk_norm: QkNorm | None) -> None:
        if qk_norm is None:
            rotate(qkv, num_rotated, rotations)
        else:
            rotate(
                qkv,
                num_rotated,
                rotations,
                num_heads=qk_norm.num_heads,
                query_weight=qk_norm.queries,
                key_weight=qk_norm.keys,
                epsilon=self._epsilon,
            )

    def act_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return act_mul(gate_up, activation)
