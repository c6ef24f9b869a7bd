"""The statistics behind what is said of the cache's side channel."""

import random

from benchmarks.side_channel import kolmogorov_smirnov


def test_p_values_are_uniform_where_nothing_differs() -> None:
    draw = random.Random(1)
    values = [
        kolmogorov_smirnov([draw.random() for _ in range(80)], [draw.random() for _ in range(80)])[1]
        for _ in range(400)
    ]
    assert 0.01 < sum(p < 0.05 for p in values) / 400 < 0.09
    assert 0.35 < sum(p < 0.5 for p in values) / 400 < 0.6


def test_known_values() -> None:
    assert kolmogorov_smirnov([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    assert kolmogorov_smirnov([1, 1, 1], [2, 2, 2])[0] == 1.0
    # n = m = 100, D = 0.2: p = 0.0314 by the asymptotic formula with Stephens' correction.
    first, second = list(range(100)), [value + 20 for value in range(100)]
    distance, p = kolmogorov_smirnov(first, second)
    assert round(distance, 3) == 0.2 and 0.025 < p < 0.04


def test_a_small_shift_is_found_among_a_thousand() -> None:
    draw = random.Random(2)
    first = [draw.gauss(30.0, 3.0) for _ in range(1000)]
    second = [draw.gauss(31.0, 3.0) for _ in range(1000)]
    assert kolmogorov_smirnov(first, second)[1] < 1e-4
