"""The users' keys as files below one folder: `<role>/user.nk` for each role, and what the broker needs in `broker/`.

A service gets its own folder and no other. The keys are made once and kept; what the broker reads is derived from
them, and written again each time, since a new version may allow something else.
"""

from collections.abc import Mapping
from pathlib import Path

from headrace_shared.broker_permissions import Role
from headrace_shared.errors import ConfigError
from headrace_shared.nkeys import new_seed, public_key_of
from headrace_shared.secret_files import ensure_private_folder, read_secret, write_secret

KEY_FILE = "user.nk"


def key_path(folder: Path, role: Role) -> Path:
    return folder / role / KEY_FILE


def ensure_keys(folder: Path, *, rotate: bool = False) -> Mapping[Role, str]:
    """Makes the keys that are not there, with `rotate` all of them. Returns the public ones. Raises ConfigError."""
    ensure_private_folder(folder)
    public_keys = {}
    for role in Role:
        path = key_path(folder, role)
        ensure_private_folder(path.parent)
        if rotate or not path.exists():
            write_secret(path, new_seed() + "\n")
        public_keys[role] = public_key(path)
    return public_keys


def public_key(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return public_key_of(read_secret(path))
    except ValueError as error:
        raise ConfigError(str(path), str(error)) from error
