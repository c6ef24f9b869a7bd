"""Where adapters may be: folders below one that is allowed, and nothing outside of it that a name or link leads to."""

import os
import stat
from pathlib import Path

from headrace_worker.adapters.config import AdapterRefused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATH_CHARS = 1024


def allowed_folder(root: str, path: str) -> Path:
    """The folder `path` below `root`, both resolved. Raises AdapterRefused for a path that is absolute, leads upwards,
    or leads out of `root` by a link; and if adapters are not to be loaded by path at all (`root` is empty)."""
    if not root:
        raise AdapterRefused("this worker loads no adapters by path (--lora-dir is not set)")
    parts = path.split("/")
    if not path or len(path) > MAX_PATH_CHARS or "\0" in path or "\\" in path or any(part == ".." for part in parts):
        raise AdapterRefused("its path is no path below the folder of adapters")
    if Path(path).is_absolute() or path.startswith("~"):
        raise AdapterRefused("its path must be relative to the folder of adapters")
    try:
        top = Path(root).expanduser().resolve(strict=True)
        folder = (top / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise AdapterRefused("there is no such folder of an adapter") from error
    if not folder.is_relative_to(top) or folder == top:
        raise AdapterRefused("its path leads out of the folder of adapters")
    if not folder.is_dir():
        raise AdapterRefused("its path is no folder")
    return folder


def read_files(folder: Path, max_bytes: int) -> tuple[bytes, bytes]:
    """The contents of its configuration and its weights, which have at most `max_bytes`. Raises AdapterRefused."""
    return _read(folder / CONFIG_FILE, MAX_CONFIG_BYTES), _read(folder / WEIGHTS_FILE, max_bytes)


def _read(file: Path, max_bytes: int) -> bytes:
    """A link, a device or a pipe in the place of a file is refused by the open file itself, not by its name before."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise AdapterRefused(f"{file.name} is missing, or cannot be read, or is a link") from error
    with open(descriptor, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRefused(f"{file.name} is no file")
        if status.st_size > max_bytes:
            raise AdapterRefused(f"{file.name} has {status.st_size} bytes, more than {max_bytes}")
        data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise AdapterRefused(f"{file.name} has more than {max_bytes} bytes")
    return data
