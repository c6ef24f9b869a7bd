"""Quantiles of few values."""

import math
from collections.abc import Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """Of at least one value: the smallest that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
