"""Which tests run in one process, and in which order: for pytest-xdist with `--no-loadscope-reorder`.

The tests of a module share its fixtures, and all that use a running system share that, whichever module they are in. So
each such system is started once, and is ended behind the last test that wants it: it would take a tenth of a core for
the rest of the run. Tests with real models are all in one process, so that no two of them want the cores at once; the
others, which mostly wait, run beside them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from _pytest.fixtures import FixtureDef
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it has no types

MODELS, CONTAINERS = "models", "containers"
SCRIPTED = "scripted"
"""The fixture's name."""
FIRST = (
    MODELS,
    CONTAINERS,
    SCRIPTED,
    "tests/integration/test_whole_path.py",
    "tests/integration/test_failover.py",
    "tests/faults/test_batches.py",
    "tests/cli/test_up.py",
    "tests/e2e/test_autoscale.py",
    "tests/integration/test_parallel_faults.py",
    "tests/faults/test_drain.py",
    "tests/faults/test_outages.py",
    "tests/integration/test_traces.py",
    "tests/faults/test_rolling_restart.py",
    "tests/integration/test_broker_cluster.py",
    "tests/e2e/test_resume.py",
    "tests/integration/test_broker_restart.py",
)
"""The groups that take longest. What is left for the end is short, so that all processes end at about the same time."""


def arrange(items: list[pytest.Item]) -> None:
    """Sorts them by group. In a group those that use the same system follow each other."""
    groups: dict[str, dict[str, list[pytest.Item]]] = {name: {} for name in FIRST}
    for item in items:
        systems = systems_of(item)
        path = item.path.relative_to(item.config.rootpath).as_posix()
        part = systems[0].argname if systems else path
        group = group_of(item.config.rootpath, path)
        groups.setdefault(group, {}).setdefault(part, []).append(item)
    items[:] = [item for parts in groups.values() for part in parts.values() for item in part]


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Who gives out the tests knows nothing of them but their names."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(Path(self.config.rootpath), nodeid.partition("::")[0])


@cache
def group_of(root: Path, path: str) -> str:
    """Of a module."""
    text = (root / path).read_text()
    if path.startswith("tests/docker/"):
        return CONTAINERS
    if path.startswith(("tests/e2e/", "tests/faults/")) and "pytest.mark.model" in text:
        return MODELS
    return SCRIPTED if f"{SCRIPTED}: Launched" in text else path


def systems_of(item: pytest.Item) -> list[FixtureDef[object]]:
    """Fixtures of our own that live as long as the session."""
    known: dict[str, Sequence[FixtureDef[object]]] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - pytest has no public name for it
    found = [definitions[-1] for _, definitions in sorted(known.items())]
    return [each for each in found if each.scope == "session" and each.baseid.startswith("tests")]


def end_systems(item: pytest.Item, following: pytest.Item | None) -> None:
    """Those that `item` has used and `following` does not want."""
    kept = [] if following is None else systems_of(following)
    for system in systems_of(item):
        if system not in kept:
            system.finish(getattr(item, "_request"))  # noqa: B009 - as above
