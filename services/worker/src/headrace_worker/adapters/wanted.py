"""Which adapters a worker was told to load at its start."""

from collections.abc import Sequence
from pathlib import Path

from headrace_shared.adapter_records import is_adapter_name
from headrace_shared.errors import ConfigError


def parse_given(given: Sequence[str]) -> dict[str, Path]:
    """NAME=FOLDER each -> folders by name. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for pair in given:
        name, equals, path = (part.strip() for part in pair.partition("="))
        if not (equals and path and is_adapter_name(name)):
            raise ConfigError("lora", f"{pair[:128]!r} is not of the form NAME=FOLDER")
        if name in folders:
            raise ConfigError("lora", f"{name} is there twice")
        folders[name] = Path(path).expanduser().resolve()
    return folders


def path_below(folder: Path, root: str) -> str:
    """As other workers find it, which allow the same folder; empty: they cannot."""
    if not root:
        return ""
    top = Path(root).expanduser().resolve()
    return folder.relative_to(top).as_posix() if folder.is_relative_to(top) and folder != top else ""
