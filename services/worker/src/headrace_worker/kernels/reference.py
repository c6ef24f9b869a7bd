"""The row kernels' functions in plain torch: what they are compared with. Imports no triton."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor | None, *, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """[rows, size] -> [rows, size]. With `residual`, adds rows to it in place and normalizes the sum."""
    if residual is not None:
        rows = residual.add_(rows)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide if weight is None else wide * weight.float()).to(rows.dtype)


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """[rows, 2 * size] -> [rows, size]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(gate_up.dtype)


def rotate(
    qkv: Tensor,
    num_rotated: int,
    rotations: Tensor,
    *,
    num_heads: int = 0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    epsilon: float = 0.0,
    pairing: str = "neighbours",
) -> None:
    """qkv [tokens, heads, head_dim], rotated in place; rotations [tokens, rotary_dim / 2] complex64."""
    heads = qkv[:, :num_rotated].float()
    if query_weight is not None and key_weight is not None:
        heads = heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + epsilon)
        heads = torch.cat([heads[:, :num_heads] * query_weight, heads[:, num_heads:] * key_weight], dim=1)
    rotary_dim = 2 * rotations.shape[1]
    turning = heads[..., :rotary_dim]
    if pairing == "neighbours":
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = torch.view_as_real(torch.complex(first, second) * rotations[:, None])
    turned = turned.flatten(-2) if pairing == "neighbours" else turned.transpose(-1, -2).flatten(-2)
    qkv[:, :num_rotated] = torch.cat([turned, heads[..., rotary_dim:]], dim=-1).to(qkv.dtype)
