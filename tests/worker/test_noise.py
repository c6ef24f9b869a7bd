"""Counter-based noise."""

import numpy as np
import pytest

from headrace_worker.noise import noise_keys, philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def _draw(seeds: list[int], choices: list[int], positions: list[int]) -> list[float]:
    keys = noise_keys(*(np.array(part, dtype=np.uint64) for part in (seeds, choices, positions)))
    return [float(key) * 2.0**-64 + 0.5 for key in keys]


def test_numbers_do_not_depend_on_what_else_is_drawn() -> None:
    together = _draw([7, 7, 8, 2**63 - 1], [0, 1, 0, 3], [5, 5, 5, 100_000])
    alone = [
        _draw([seed], [choice], [position])[0]
        for seed, choice, position in ((7, 0, 5), (7, 1, 5), (8, 0, 5), (2**63 - 1, 3, 100_000))
    ]
    assert together == alone
    assert len(set(together)) == 4


def test_both_halves_of_the_seed_count() -> None:
    assert _draw([5], [0], [0]) != _draw([5 + (1 << 32)], [0], [0])


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_numbers_are_uniform_along_every_coordinate(varied: str) -> None:
    count = 20_000
    running, fixed = list(range(count)), [3] * count
    values = np.array(_draw(*(running if name == varied else fixed for name in ("seed", "choice", "position"))))
    assert values.min() >= 0.0
    assert values.max() <= 1.0
    histogram, _ = np.histogram(values, bins=20, range=(0, 1))
    chi_square = float((((histogram - count / 20) ** 2) / (count / 20)).sum())
    assert chi_square < 45, "beyond the 0.1 % quantile of 19 degrees of freedom"
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
