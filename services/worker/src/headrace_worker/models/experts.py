"""A mixture of experts over a flat batch: route, sort by expert, one grouped matrix product each way.

No shape depends on where tokens go, so nothing waits for the device.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_shared.errors import ConfigError
from headrace_worker.models.config import MixtureConfig
from headrace_worker.models.decoder_weights import Mixture

_ALIGNMENT = 16
"""Rows of the grouped product's matrices must be so many bytes apart, or a multiple."""


def mix_experts(rows: Tensor, weights: Mixture, config: MixtureConfig, act_mul: Callable[[Tensor], Tensor]) -> Tensor:
    """[tokens, hidden_size] -> [tokens, hidden_size]: the weighted sum of the chosen experts' outputs (of this rank's
    part of their inner size)."""
    num_tokens, num_chosen = rows.shape[0], config.num_chosen
    scores, experts = route(rows, weights.router, config)
    order = experts.flatten().argsort(stable=True)
    counts = torch.zeros(config.num_experts, dtype=torch.int32, device=rows.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    sorted_rows = rows.index_select(0, order // num_chosen)
    inner = act_mul(F.grouped_mm(sorted_rows, weights.gate_up.transpose(1, 2), offs=ends))
    outputs = F.grouped_mm(inner, weights.down.transpose(1, 2), offs=ends)
    # Back in the order of tokens first, so that a token's sum is the same whatever else is in the batch.
    by_token = torch.empty_like(outputs).index_copy_(0, order, outputs).view(num_tokens, num_chosen, -1)
    return (by_token * scores.unsqueeze(-1)).sum(dim=1).to(rows.dtype)


def check_alignment(inner_size: int, hidden_size: int, dtype: torch.dtype) -> None:
    """Raises ConfigError for experts that the grouped product does not take."""
    for what, size in (("an inner size", inner_size), ("a hidden size", hidden_size)):
        if size * dtype.itemsize % _ALIGNMENT:
            raise ConfigError(
                "model", f"experts with {what} of {size} on each rank: not a multiple of {_ALIGNMENT // dtype.itemsize}"
            )


def route(rows: Tensor, router: Tensor, config: MixtureConfig) -> tuple[Tensor, Tensor]:
    """The chosen experts' weights (float32) and numbers, each [tokens, num_chosen]."""
    probabilities = F.linear(rows, router).softmax(dim=-1, dtype=torch.float32)
    scores, experts = probabilities.topk(config.num_chosen, dim=-1)
    if config.renormalizes:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores, experts
