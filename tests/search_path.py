"""Where processes that tests start find the tests' own modules."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = str(Path(__file__).parents[1])


def with_tests(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the repository's root."""
    return os.pathsep.join(dict.fromkeys((ROOT, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))))
