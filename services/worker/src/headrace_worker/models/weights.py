"""Where weights come from: tensors or parts of them, by the names of Hugging Face checkpoints."""

import json
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from headrace_shared.errors import ConfigError


class TensorSource(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """KeyError if there is none of that name."""
        ...

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Reads a tensor, or consecutive rows and columns (of a matrix) of it, in the type it is stored in. Of the
        rest, as little as possible is read. KeyError if there is none of that name."""
        ...


class SafetensorsFolder:
    """All `*.safetensors` files of a folder. Nothing that could run code is opened.

    One file is mapped at a time, so that no more than that file counts as memory of the process.
    """

    def __init__(self, folder: Path) -> None:
        files = _weight_files(folder)
        if not files:
            others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            hint = f" ({others[0]} is not opened: it may run code)" if others else ""
            raise ConfigError("model", f"{folder} holds no safetensors weights{hint}")
        stored = [(name, file) for file in files for name in _open(file).keys()]  # noqa: SIM118  (no dictionary)
        self._owners = {_text_name(name): (name, file) for name, file in stored}
        self._open_path = files[0]
        self._opened = _open(files[0])

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def shape(self, name: str) -> tuple[int, ...]:
        own_name, file = self._opened_for(name)
        return tuple(file.get_slice(own_name).get_shape())

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        own_name, file = self._opened_for(name)
        if rows is None and columns is None:
            whole: torch.Tensor = file.get_tensor(own_name)
            return whole
        row_slice = slice(None) if rows is None else slice(rows.start, rows.stop)
        stored = file.get_slice(own_name)
        part: torch.Tensor = stored[row_slice] if columns is None else stored[row_slice, columns.start : columns.stop]
        return part

    def _opened_for(self, name: str) -> tuple[str, Any]:
        own_name, path = self._owners[name]
        if path != self._open_path:
            self._opened = _open(path)
            self._open_path = path
        return own_name, self._opened


def _text_name(name: str) -> str:
    """Models that see images keep their text part under a name of its own: an older one or a newer one."""
    for prefix, replacement in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(str(file), framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError("model", f"cannot read {file}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("model", f"{index} is unreadable: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise ConfigError("model", f"{index} names files outside its folder")
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ConfigError("model", f"{folder} lacks {missing[0]} (incomplete download?)")
    return [folder / name for name in names]
