"""Under which licences everything is that a running Headrace imports; ends with exit code 1 where one is not allowed.

    python deploy/licences.py [--list]

Looks at what is installed of that which the distributions of this project ask for, and, by their metadata, what that
needs. What is not installed here (for other systems) is not looked at.
"""

import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "LLVM-exception",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
    }
)
"""SPDX identifiers. All of them let the services be run, changed and given away together; MPL-2.0 as long as its own
files stay under it."""
EXCEPTIONS = re.compile(r"nvidia-.*|cuda-.*")
"""CUDA's libraries, under NVIDIA's terms: they come with torch, on machines that have NVIDIA GPUs."""
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
}
_NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "mit license": "MIT",
    "python-2.0": "PSF-2.0",
}
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
_WORD = re.compile(r"\(|\)|[A-Za-z0-9.+-]+")


class Licence(NamedTuple):
    package: str
    expression: str
    """In SPDX's notation; empty if nothing is said."""
    is_allowed: bool


def licences(requirements: Iterable[str]) -> list[Licence]:
    """Of all that is installed of these and of what they need."""
    found = []
    for name, package in sorted(_needed(requirements).items()):
        expression = expression_of(package)
        found.append(Licence(name, expression, bool(EXCEPTIONS.fullmatch(name)) or is_allowed(expression)))
    return found


def expression_of(package: Distribution) -> str:
    metadata = package.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    kinds = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or [] if line.startswith("License")]
    known = [_CLASSIFIERS[kind] for kind in kinds if kind in _CLASSIFIERS]
    if known:
        return " AND ".join(known)
    stated = metadata["License"].strip() if "License" in metadata else ""
    return _NAMES.get(stated.lower(), stated if len(stated) < 64 else "")


def is_allowed(expression: str) -> bool:
    """Of an SPDX expression: OR leaves the choice to us, AND and WITH do not."""
    words: list[str] = _WORD.findall(expression)
    position = 0

    def peek() -> str:
        return words[position] if position < len(words) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return words[position - 1]

    def atom() -> bool:
        if peek() == "(":
            take()
            value = either()
            return peek() == ")" and take() == ")" and value
        return bool(peek()) and take() in ALLOWED

    def chain(operand: Callable[[], bool], operators: Mapping[str, Callable[[bool, bool], bool]]) -> bool:
        value = operand()
        while peek().upper() in operators:
            join = operators[take().upper()]
            value = join(operand(), value)
        return value

    def all_of() -> bool:
        return chain(atom, {"AND": lambda a, b: a and b, "WITH": lambda a, b: a and b})

    def either() -> bool:
        return chain(all_of, {"OR": lambda a, b: a or b})

    value = either()
    return value and position == len(words)


def _needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    wanted = [named for line in requirements for named in _named(line, "")]
    seen = set(wanted)
    for name, extra in wanted:  # grows
        try:
            package = found.setdefault(name, distribution(name))
        except PackageNotFoundError:
            continue
        for other in _requirements(package, extra):
            if other not in seen:
                seen.add(other)
                wanted.append(other)
    return found


def _requirements(package: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """(name, extra) of each."""
    for line in package.requires or []:
        yield from _named(line, extra)


def _named(line: str, extra: str) -> Iterator[tuple[str, str]]:
    """(name, extra) in one requirement, if it holds for `extra`. No other markers are looked at."""
    match = _REQUIREMENT.fullmatch(line)
    if match is None:
        return
    name, extras, marker = match[1], match[2] or "", match[3] or ""
    asked = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    if asked is None or _normal(asked[1]) == extra:
        yield _normal(name), ""
        for more in filter(None, (part.strip() for part in extras.split(","))):
            yield _normal(name), _normal(more)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def own_requirements() -> list[str]:
    """What this project's distributions ask for, with all extras."""
    root = Path(__file__).resolve().parents[1]
    read = runpy.run_path(str(root / "deploy/docker/requirements.py"))["requirements"]
    services = [str(root / "services" / name) for name in ("router", "scheduler", "worker[gpu]", "autoscaler[gpu]")]
    asked: list[str] = read([str(root / "shared[grammar]"), *services, str(root / "cli"), str(root / "simulator")])
    return asked


def main() -> int:
    found = licences(own_requirements())
    if "--list" in sys.argv:
        for licence in found:
            print(f"{licence.package:44} {licence.expression or '(says nothing)'}")
    bad = [licence for licence in found if not licence.is_allowed]
    for licence in bad:
        print(f"not allowed: {licence.package}: {licence.expression or 'says nothing'}", file=sys.stderr)
    if not found:
        print("nothing is installed here", file=sys.stderr)
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
