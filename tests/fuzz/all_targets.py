"""Everything that reads what others wrote."""

from pathlib import Path

from tests.fuzz import answers, bodies, checkpoints, wire
from tests.fuzz.fuzzing import Target


def all_targets(folder: Path) -> list[Target]:
    """`folder`: an empty one, for files."""
    return [*wire.targets(), *bodies.targets(), *answers.targets(), *checkpoints.targets(folder)]
