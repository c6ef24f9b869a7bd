"""Prints what the given distributions need from the package index, for `pip install -r`.

Images install this in a layer of its own, which stays valid while only code changes.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[(?P<extras>[A-Za-z0-9._,\s-]+)\])?")


def requirements(folders: list[str]) -> list[str]:
    """The union of the distributions' requirements, without the project's own distributions, but with what the extras
    need that one asks of another. `folder[extra]` adds the extra's."""
    projects: dict[str, Any] = {}
    wanted: list[tuple[str, str]] = []
    for folder in folders:
        path, _, extra = folder.rstrip("]").partition("[")
        project = tomllib.loads((Path(path) / "pyproject.toml").read_text())["project"]
        projects[project["name"]] = project
        wanted += [(project["name"], ""), *([(project["name"], extra)] if extra else [])]
    needed: set[str] = set()
    for name, extra in wanted:  # grows
        project = projects[name]
        for requirement in project["optional-dependencies"][extra] if extra else project.get("dependencies", []):
            found = _REQUIREMENT.match(requirement)
            if found is None or not found["name"].startswith("headrace"):
                needed.add(requirement)
                continue
            extras = [part.strip() for part in (found["extras"] or "").split(",") if part.strip()]
            wanted += [(found["name"], extra) for extra in extras if (found["name"], extra) not in wanted]
    return sorted(needed)


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
