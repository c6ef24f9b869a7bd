"""Where weights come from: one tensor at a time, by the names of Hugging Face checkpoints."""

import json
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from headrace_shared.errors import ConfigError


class TensorSource(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str) -> torch.Tensor:
        """Reads one tensor from disk, in the type it is stored in. KeyError if there is none of that name."""
        ...


class SafetensorsFolder:
    """All `*.safetensors` files of a folder, read tensor by tensor. Nothing that could run code is opened."""

    def __init__(self, folder: Path) -> None:
        files = _weight_files(folder)
        if not files:
            others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
            hint = f" ({others[0]} is not opened: it may run code)" if others else ""
            raise ConfigError("model", f"{folder} holds no safetensors weights{hint}")
        self._owners: dict[str, Any] = {}
        for file in files:
            try:
                shard: Any = safetensors.safe_open(str(file), framework="pt")
                self._owners.update(dict.fromkeys(shard.keys(), shard))
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError("model", f"cannot read {file}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._owners[name].get_tensor(name)
        return tensor


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
