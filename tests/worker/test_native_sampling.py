"""The compiled draw against the one by tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_shared.messages import SamplingParams
from headrace_worker.native.library import Library
from headrace_worker.native.sampling import Filters, draw
from headrace_worker.sampling import SamplingState, sample
from tests.worker.engine_driver import make_admission
from tests.worker.native_variants import library

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.7, "min_p": 0.01},
]


@pytest.fixture(params=["native", "portable"])
def kernels(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def tokens_of(logits: Tensor, params: dict[str, Any], kernels: Library | None) -> list[int]:
    sampling = [SamplingParams(**{"temperature": 1.0, "seed": row, **params}) for row in range(logits.shape[0])]
    states = [SamplingState(make_admission([1], each), logits.shape[1]) for each in sampling]
    return [item.token for item in sample(logits, states, kernels=kernels)]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 127, 128, 129, 1000, 8192])
def test_draws_what_tensors_draw(kernels: Library, width: int, params: dict[str, Any]) -> None:
    logits = torch.randn(40, width, generator=torch.Generator().manual_seed(width)) * 4
    # Rounding may let another clock ring first, about once in a million draws.
    assert tokens_of(logits, params, kernels) == tokens_of(logits, params, None)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_masked_tokens_are_never_drawn(kernels: Library, params: dict[str, Any]) -> None:
    logits = torch.randn(64, 700, generator=torch.Generator().manual_seed(1))
    allowed = torch.tensor([3, 130, 699])
    masked = torch.full_like(logits, -torch.inf)
    masked[:, allowed] = logits[:, allowed]
    assert set(tokens_of(masked, params, kernels)) <= set(allowed.tolist())


def test_flat_rows_are_cut_where_tensors_cut_them(kernels: Library) -> None:
    """All weights alike, and so far below the likeliest that neither head holds enough of them."""
    logits = torch.zeros(50, 4096)
    logits[:, 5] = 14.0
    for params in FILTERS:
        assert tokens_of(logits, params, kernels) == tokens_of(logits, params, None), params
        assert tokens_of(torch.zeros(50, 4096), params, kernels) == tokens_of(torch.zeros(50, 4096), params, None)


def test_scores_stay_as_they_are(kernels: Library) -> None:
    logits = torch.randn(5, 300)
    before = logits.clone()
    tokens_of(logits, {"top_k": 3, "top_p": 0.5}, kernels)
    assert torch.equal(logits, before)


def test_what_the_kernel_does_not_take(kernels: Library) -> None:
    def filters(rows: int) -> Filters:
        ones = torch.ones(rows)
        return Filters(ones, torch.zeros(rows, dtype=torch.int64), ones.double(), torch.zeros(rows))

    keys = torch.zeros(2, dtype=torch.int64)
    for scores, given in (
        (torch.zeros(2, 8, dtype=torch.float64), filters(2)),
        (torch.zeros(8, 2).t(), filters(2)),
        (torch.zeros(2, 0), filters(2)),
        (torch.zeros(2, 8), filters(3)),
        (torch.zeros(2, 8), filters(2)._replace(top_p=torch.ones(2))),
    ):
        with pytest.raises(ValueError, match=r"scores|temperatures|top_p"):
            draw(scores, given, keys, library=kernels)
