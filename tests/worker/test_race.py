"""Drawing by weight: the distribution, and how little rounding of the weights matters."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_worker.noise import noise_keys
from headrace_worker.race import CHUNK, clocks, race


def run(weights: Tensor, first_seed: int = 0) -> Tensor:
    """One race a row, each with a seed of its own."""
    count = weights.shape[0]
    zeros = np.zeros(count, dtype=np.uint64)
    keys = noise_keys(np.arange(first_seed, first_seed + count, dtype=np.uint64), zeros, zeros)
    return race(weights, torch.from_numpy(keys))


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    observed = torch.bincount(tokens, minlength=expected.shape[0]).double()
    return float(((observed - expected) ** 2 / expected).sum())


def test_tokens_win_by_their_weights() -> None:
    weights = torch.tensor([[1.0, 0.5, 0.0, 0.25, 0.01, 1.0]])
    tokens = run(weights.expand(20_000, -1).contiguous())
    assert (tokens != 2).all()
    kept = weights[0, weights[0] > 0].double()
    renumbered = torch.tensor([0, 1, -1, 2, 3, 4])[tokens]
    assert chi_square(renumbered, kept / kept.sum() * 20_000) < 18.5, "beyond the 0.1 % quantile of 4 degrees"


def test_tokens_win_by_their_weights_over_many_chunks() -> None:
    """One token as likely as all the others together, of which those of some chunks are twice as likely."""
    weights = torch.full((1, 50_000), 1.0)
    weights[0, 25_000:] = 0.5
    weights[0, 7] = 37_500.0
    tokens = run(weights.expand(1500, -1))
    expected = torch.tensor([1 / 2, 1 / 3, 1 / 6], dtype=torch.float64) * 1500
    groups = torch.where(tokens == 7, 0, torch.where(tokens < 25_000, 1, 2))
    assert chi_square(groups, expected) < 13.8, "beyond the 0.1 % quantile of 2 degrees of freedom"
    assert len(set(tokens.tolist())) > 650
    within = torch.bincount(tokens[tokens != 7] % CHUNK, minlength=CHUNK)
    assert int(within.max()) < 25


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Logits as flat as those of ordinary text, and an error as large as that of float32 in another batch."""
    generator = torch.Generator().manual_seed(4)
    logits = 2.5 * torch.randn(150, 49_152, generator=generator)
    changed = logits + 2e-5 * torch.randn(150, 49_152, generator=generator)
    drawn, again = (run((scores - scores.amax(-1, keepdim=True)).exp()) for scores in (logits, changed))
    assert (drawn != again).sum() <= 1
    assert len(set(drawn.tolist())) > 120


def test_a_race_does_not_depend_on_the_others() -> None:
    weights = torch.rand(20, 3 * CHUNK + 5, generator=torch.Generator().manual_seed(5)) ** 8
    weights /= weights.amax(-1, keepdim=True)
    together = run(weights)
    assert together.tolist() == [int(run(weights[row : row + 1], row)) for row in range(20)]


def test_clocks_are_uniform_and_independent() -> None:
    keys = torch.arange(200)[:, None].expand(-1, 500)
    values = clocks(keys, torch.arange(500).expand(200, -1))
    assert float(values.min()) > 0.0 and float(values.max()) < 1.0
    histogram = torch.histc(values.float(), bins=20, min=0.0, max=1.0).double()
    assert float(((histogram - 5000) ** 2 / 5000).sum()) < 43.8, "beyond the 0.1 % quantile of 19 degrees of freedom"
    for first, second in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs(float(np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1])) < 0.015


@pytest.mark.parametrize("width", [1, 5, CHUNK, CHUNK + 3, 4 * CHUNK])
def test_a_token_without_weight_never_wins(width: int) -> None:
    for position in {0, width // 2, width - 1}:
        weights = torch.zeros(50, width)
        weights[:, position] = 1e-30
        assert run(weights).tolist() == [position] * 50
