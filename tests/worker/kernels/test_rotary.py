"""Rotation in place, beside the same in torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_worker.kernels import reference
from headrace_worker.kernels.rotary import Pairing, rotate
from tests.worker.kernels.tensors import close, random


def rotations_of(tokens: int, rotary_dim: int, device: torch.device) -> Tensor:
    angles = torch.randn(tokens, rotary_dim // 2, generator=torch.Generator().manual_seed(9)) * 3
    return torch.complex(angles.cos(), angles.sin()).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairing", ["neighbours", "halves"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (128, 32), (256, 256)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_rotate_equals_the_reference(
    device: torch.device, dtype: torch.dtype, pairing: Pairing, head_dim: int, rotary_dim: int, normalizes: bool
) -> None:
    num_heads, num_kv_heads, tokens = 5, 2, 3
    qkv = random(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    expected = qkv.clone()
    rotations = rotations_of(tokens, rotary_dim, device)
    queries, keys = (1 + random(head_dim, dtype=torch.float32, device=device, seed=seed) for seed in (1, 2))
    arguments: dict[str, Any] = {
        "num_heads": num_heads,
        "query_weight": queries if normalizes else None,
        "key_weight": keys if normalizes else None,
        "epsilon": 1e-6,
        "pairing": pairing,
    }
    reference.rotate(expected, num_heads + num_kv_heads, rotations, **arguments)
    rotate(qkv, num_heads + num_kv_heads, rotations, **arguments)
    close(qkv, expected)
    assert torch.equal(qkv[:, num_heads + num_kv_heads :], expected[:, num_heads + num_kv_heads :])


def test_many_heads_of_tokens_that_lie_apart(device: torch.device) -> None:
    wide = random(4, 80, 64, dtype=torch.float32, device=device)
    expected = wide.clone()
    rotations = rotations_of(4, 64, device)
    reference.rotate(expected[:, 8:], 70, rotations)
    rotate(wide[:, 8:], 70, rotations)
    close(wide, expected)


def test_both_pairings_are_the_same_rotation(device: torch.device) -> None:
    halves = random(2, 3, 64, dtype=torch.float32, device=device)
    neighbours = halves.view(2, 3, 2, 32).transpose(2, 3).reshape(2, 3, 64).contiguous()
    rotations = rotations_of(2, 64, device)
    rotate(halves, 3, rotations, pairing="halves")
    rotate(neighbours, 3, rotations)
    close(neighbours, halves.view(2, 3, 2, 32).transpose(2, 3).reshape(2, 3, 64))


def test_refuses_what_it_cannot_rotate(device: torch.device) -> None:
    qkv, rotations = torch.zeros(2, 4, 64, device=device), rotations_of(2, 64, device)
    with pytest.raises(ValueError, match="5 of 4 heads"):
        rotate(qkv, 5, rotations)
    with pytest.raises(ValueError, match="both or neither"):
        rotate(qkv, 4, rotations, query_weight=torch.ones(64, device=device), num_heads=2)
    with pytest.raises(ValueError, match="128 of 64 components"):
        rotate(qkv, 4, rotations_of(2, 128, device))
    with pytest.raises(ValueError, match="rotations has the shape"):
        rotate(qkv, 4, rotations_of(3, 64, device))
