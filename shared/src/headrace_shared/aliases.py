"""Other names for the same figures, made when somebody reads them: an alias costs nothing where it is counted."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

ENGINE = "0"
"""Value of vLLM's label `engine`, which tells the engines of one process apart: there is one."""
_SUFFIXES = ("_bucket", "_count", "_sum", "_total")


class Alias(NamedTuple):
    name: str
    """Without `_total` for a counter."""
    source: Counter | Gauge | Histogram
    model_label: str
    """Label of the source that becomes `model_name`; values that differ in other labels only are added up."""


class Aliases:
    """A collector for a registry."""

    def __init__(self, aliases: Callable[[], list[Alias]]) -> None:
        self._aliases = aliases

    def collect(self) -> Iterator[Metric]:
        for alias in self._aliases():
            for family in alias.source.collect():
                yield _renamed(family, alias)

    def describe(self) -> list[Metric]:
        """Asked at registration, when the names may not be known yet."""
        return []


def _renamed(family: Metric, alias: Alias) -> Metric:
    sums: dict[tuple[str, str, str | None], float] = {}
    for sample in family.samples:
        suffix = next((suffix for suffix in _SUFFIXES if sample.name.endswith(suffix)), "")
        if sample.name.endswith("_created"):
            continue
        key = (suffix, sample.labels.get(alias.model_label, ""), sample.labels.get("le"))
        sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(alias.name, f"As {family.name}.", family.type)
    for (suffix, model, bound), value in sums.items():
        labels = {"model_name": model, "engine": ENGINE} | ({"le": bound} if bound is not None else {})
        renamed.add_sample(alias.name + suffix, labels, value)
    return renamed
