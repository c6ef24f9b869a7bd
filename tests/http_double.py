"""HTTP servers with written answers, in a thread of the test's process."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POLL_S = 0.05


class SilentHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is for tests."""


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """On a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
