"""The environment of helper processes, which need no secret of their parent's."""

import os

_NAMES = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "TMPDIR")


def child_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _NAMES if name in os.environ}
