"""The page's own files, read once at the start. Nothing is ever loaded from elsewhere, and nothing inline is run."""

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
INDEX = "index.html"


class PageFile(NamedTuple):
    content: bytes
    media_type: str
    etag: str

    def respond(self, known_etag: str | None) -> Response:
        headers = {**HEADERS, "etag": self.etag}
        if known_etag == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


def read_files() -> dict[str, PageFile]:
    """By path below the folder `static`."""
    return dict(_walk(files("headrace_router.dashboard") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, PageFile]]:
    for each in folder.iterdir():
        path = prefix + each.name
        if each.is_dir():
            yield from _walk(each, path + "/")
        elif (media_type := _TYPES.get(path.rpartition(".")[2])) is not None:
            content = each.read_bytes()
            yield path, PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
