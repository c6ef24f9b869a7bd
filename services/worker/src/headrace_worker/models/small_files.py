"""A checkpoint's small files, which are input from outside: read within bounds, every fault in them a ConfigError."""

import json
import re
from pathlib import Path
from typing import Any

from headrace_shared.errors import ConfigError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_JSON_BYTES = 8 << 20
"""Several times the largest configuration that is in use. In memory a file may become twenty times as large."""
MAX_INDEX_BYTES = 64 << 20
"""Of an index of weights, which has a line for each of them."""
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 64 << 20
"""No model card is larger."""


def read_bytes(path: Path, most: int) -> bytes:
    """Raises ConfigError for a file that is larger, is no plain file, or cannot be read."""
    try:
        if not path.is_file():  # a pipe would never end
            raise ConfigError("model", f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    if len(data) > most:
        raise ConfigError("model", f"{path} is larger than {most} bytes")
    return data


def read_text(path: Path, most: int) -> str:
    """UTF-8. Raises ConfigError."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from error


def read_json(path: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """{} if there is no such file. Raises ConfigError for one that is no JSON object."""
    if not path.exists():
        return {}
    text = read_text(path, most)
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be told to anybody
    except RecursionError as error:
        raise ConfigError("model", f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("model", f"{path} is no JSON object")
    return value
