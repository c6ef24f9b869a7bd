"""Files that only their owner may read. They appear whole or not at all."""

import os
import secrets
from pathlib import Path

from headrace_shared.errors import ConfigError

MAX_SECRET_BYTES = 64 * 1024


def ensure_private_folder(path: Path) -> None:
    """Makes it with mode 0700; one that is there must be ours alone. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(str(path), f"cannot make this folder: {error.strerror}") from error
    if path.is_symlink():
        raise ConfigError(str(path), "is a link; secrets are kept in a folder of their own")
    if status.st_mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(str(path), f"others may read this folder: {error.strerror}") from error


def write_secret(path: Path, content: str) -> None:
    """With mode 0600, in place of what was there. Raises ConfigError."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ConfigError(str(path), f"cannot write: {error.strerror}") from error


def read_secret(path: Path) -> str:
    """Raises ConfigError, without the content."""
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(MAX_SECRET_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise ConfigError(str(path), f"cannot read: {reason}") from error
    if len(content) > MAX_SECRET_BYTES:
        raise ConfigError(str(path), f"exceeds {MAX_SECRET_BYTES} bytes")
    return content
