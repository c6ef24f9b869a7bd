"""What a client calls a file, made harmless. Pure. The name is shown and never used as a path."""

import unicodedata
from urllib.parse import quote

MAX_CHARS = 128
MAX_BYTES = 255
FALLBACK = "file"


def safe_filename(given: str) -> str:
    """The last element of a path, without characters that are invisible, control a terminal or turn the text around."""
    name = given.replace("\\", "/").rpartition("/")[2]
    # Categories C*: controls, formats such as those for right-to-left, surrogates; Z*: only plain blanks are kept.
    name = "".join(
        " " if unicodedata.category(char).startswith("Z") else char
        for char in name
        if not unicodedata.category(char).startswith("C")
    )
    name = " ".join(name.split()).strip(". ")
    name = name[:MAX_CHARS]
    while len(name.encode()) > MAX_BYTES:
        name = name[:-1]
    return name.strip() or FALLBACK


def content_disposition(name: str) -> str:
    """Of a safe name (RFC 6266)."""
    plain = "".join(char if char.isascii() and char not in '"\\%' else "_" for char in name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
