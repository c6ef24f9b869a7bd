"""Prints what the given distributions need from the package index, for `pip install -r`.

Images install this in a layer of its own, which stays valid while only code changes.
"""

import sys
import tomllib
from pathlib import Path


def requirements(folders: list[str]) -> list[str]:
    """The union of the distributions' requirements, without the project's own distributions. `folder[extra]` adds the
    extra's."""
    needed: set[str] = set()
    for folder in folders:
        path, _, extra = folder.rstrip("]").partition("[")
        project = tomllib.loads((Path(path) / "pyproject.toml").read_text())["project"]
        needed.update(project.get("dependencies", []))
        needed.update(project["optional-dependencies"][extra] if extra else [])
    return sorted(requirement for requirement in needed if not requirement.startswith("headrace"))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
