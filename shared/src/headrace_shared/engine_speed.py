"""How fast a model's workers compute, fitted to what they report. Pure.

An iteration with n decoding sequences and p prompt tokens takes about c + b·n + a·p seconds: the weights are read once,
each sequence's cache once, and a prompt token costs its arithmetic (the roofline of Williams et al., 2009, in three
numbers). So the busy seconds of any period are c·iterations + b·output tokens + a·prompt tokens, and least squares over
many periods tell the three apart, which lets a lightly loaded fleet say what it could do at full batch.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

HALF_LIFE_S = 60.0
"""What was measured so long ago counts half."""
MIN_BUSY_S = 0.2
"""Less work than this says nothing."""
PRIOR_ITERATIONS = 4.0
"""Weight of the guess below, in iterations."""
GUESSED_OUTPUT = 1 / 16
GUESSED_PROMPT = 1 / 64
"""Cost of a sequence and of a prompt token in iterations, where the load was too even to tell."""


class EngineSpeed(NamedTuple):
    """Seconds."""

    per_iteration: float
    per_output: float
    per_prompt: float

    def iteration_s(self, num_sequences: float, num_prompt_tokens: float) -> float:
        return self.per_iteration + self.per_output * num_sequences + self.per_prompt * num_prompt_tokens

    def load(self, outputs_per_s: float, prompt_tokens_per_s: float, full_batch: float) -> float:
        """Share of what a worker can do with batches of `full_batch` sequences that it does at these rates. Unlike the
        number of its sequences it is proportional to the requests that come: few sequences run fast, many slowly."""
        per_output = self.per_output + self.per_iteration / max(1.0, full_batch)
        return outputs_per_s * per_output + prompt_tokens_per_s * self.per_prompt


class Work(NamedTuple):
    """Of one worker since its report before."""

    busy_s: float
    num_iterations: float
    num_outputs: float
    num_prompt_tokens: float


class SpeedMeter:
    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self._busy_s = 0.0
        self._counted_at: float | None = None
        self._speed: EngineSpeed | None = None
        """By all that was observed; None where that was not computed, or was not enough."""

    def observe(self, work: Work, now: float) -> None:
        if work.busy_s <= 0.0 or work.num_iterations <= 0.0:
            return
        if self._counted_at is not None:
            self._fade(0.5 ** (max(0.0, now - self._counted_at) / HALF_LIFE_S))
        self._counted_at = now
        row = (work.num_iterations, work.num_outputs, work.num_prompt_tokens)
        for i, left in enumerate(row):
            self._targets[i] += left * work.busy_s
            for j, right in enumerate(row):
                self._products[i][j] += left * right
        self._busy_s += work.busy_s
        self._speed = None

    def speed(self) -> EngineSpeed | None:
        """None until enough was seen. No cost is negative."""
        if self._speed is None and self._busy_s >= MIN_BUSY_S:
            self._speed = self._fitted()
        return self._speed

    def _fitted(self) -> EngineSpeed | None:
        products = [list(row) for row in self._products]
        # Two rows of a guess: so many sequences, or prompt tokens, cost as much as an iteration by itself.
        for index, share in ((1, GUESSED_OUTPUT), (2, GUESSED_PROMPT)):
            guess = [0.0] * 3
            guess[0], guess[index] = -PRIOR_ITERATIONS, PRIOR_ITERATIONS / share
            for i in range(3):
                for j in range(3):
                    products[i][j] += guess[i] * guess[j]
        best: tuple[float, tuple[float, ...]] | None = None
        for size in (3, 2, 1):
            for chosen in combinations(range(3), size):
                solved = _solve(products, self._targets, chosen)
                if solved is None or min(solved) < 0.0:
                    continue
                # The squared error, but for a constant.
                error = -sum(cost * target for cost, target in zip(solved, self._targets, strict=True))
                if best is None or error < best[0]:
                    best = (error, solved)
        return None if best is None else EngineSpeed(*best[1])

    def _fade(self, factor: float) -> None:
        self._busy_s *= factor
        self._targets = [factor * target for target in self._targets]
        self._products = [[factor * value for value in row] for row in self._products]


def _solve(
    products: Sequence[Sequence[float]], targets: Sequence[float], chosen: tuple[int, ...]
) -> tuple[float, ...] | None:
    """Least squares over the chosen costs, the others being zero; None if they cannot be told apart."""
    rows = [[products[i][j] for j in chosen] + [targets[i]] for i in chosen]
    size = len(chosen)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-12:
            return None
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [left - factor * right for left, right in zip(rows[row], rows[column], strict=True)]
    solved = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (rows[row][size] - known) / rows[row][row]
    costs = [0.0] * 3
    for index, cost in zip(chosen, solved, strict=True):
        costs[index] = cost
    return tuple(costs)
