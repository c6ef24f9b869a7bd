"""Where weights come from: tensors or parts of them, by the names of Hugging Face checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.models.safetensors_header import READABLE, TensorHead, read_header
from headrace_worker.models.small_files import MAX_INDEX_BYTES, read_json


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
        self._stored: dict[str, _Stored] = {}
        for file in files:
            for name, head in read_header(file).items():
                if (known := _text_name(name)) in self._stored:
                    raise ConfigError("model", f"{folder} holds {known[:100]} twice")
                self._stored[known] = _Stored(name, file, head)
        self._open_path = files[0]
        self._opened = _open(files[0])

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        head = self._stored[name].head
        if head.kind not in READABLE:
            # Whole numbers mean nothing without the scales of whoever quantized them.
            raise ConfigError("model", f"{name} is stored as {head.kind} (only {', '.join(READABLE)} can be read)")
        return head.shape

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        stored = self._stored[name]
        if stored.file != self._open_path:
            self._opened = _open(stored.file)
            self._open_path = stored.file
        try:
            if rows is None and columns is None:
                whole: torch.Tensor = self._opened.get_tensor(stored.own_name)
                return whole
            row_slice = slice(None) if rows is None else slice(rows.start, rows.stop)
            view = self._opened.get_slice(stored.own_name)
            part: torch.Tensor = view[row_slice] if columns is None else view[row_slice, columns.start : columns.stop]
            return part
        except safetensors.SafetensorError as error:
            raise ConfigError("model", f"cannot read {name} from {stored.file}: {error}") from error


class _Stored(NamedTuple):
    own_name: str
    """In its file."""
    file: Path
    head: TensorHead


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
        return sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    places = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError("model", f"{index} is no index of weights")
    names = sorted(set(places.values()))
    if any(Path(name).name != name or "\0" in name for name in names):
        raise ConfigError("model", f"{index} names files outside its folder")
    if others := [name for name in names if not name.endswith(".safetensors")]:
        raise ConfigError("model", f"{index} names {others[0][:100]}, which is no safetensors file")
    # Not each name asked for: the system refuses to look for one that is too long.
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    if missing := [name for name in names if name not in present]:
        raise ConfigError("model", f"{folder} lacks {missing[0][:100]} (incomplete download?)")
    return [folder / name for name in names]
