"""uvicorn inside our own event loop: our signals, our socket, our shutdown."""

import contextlib
import logging
import math
import resource
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn
from fastapi import FastAPI

from headrace_router.connection_counts import ConnectionCounts
from headrace_router.http_protocol import BoundedHttpProtocol
from headrace_shared.errors import ConfigError

BACKLOG = 2048
KEEP_ALIVE_S = 75
OWN_DESCRIPTORS = 128
"""For what is no client's: the broker, helper processes, files."""


class WebServer(uvicorn.Server):
    """`serve([socket])` runs until `should_exit` is set and all answers are finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The service handles them."""
        yield


def make_server(
    app: FastAPI, counts: ConnectionCounts, refused: Callable[[str], None], *, drain_timeout_s: float
) -> WebServer:
    """`refused` is told the code of each connection's refusal."""
    # Counted, not logged: anybody could fill the log with them.
    logging.getLogger("uvicorn.error").addFilter(_is_no_bad_request)
    config = uvicorn.Config(
        app,
        http=partial(BoundedHttpProtocol, counts, refused),  # type: ignore[arg-type]  # it is only called
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(drain_timeout_s),
    )
    return WebServer(config)


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    return record.msg != "Invalid HTTP request received."


def room_for_connections(wanted: int) -> int:
    """How many client connections there are descriptors for. Beyond that number nothing could be accepted, and no
    connection to the broker be made either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OWN_DESCRIPTORS))


def listen(host: str, port: int, stuck_timeout_s: float) -> socket.socket:
    """Raises ConfigError if the address cannot be had. Connections whose peer takes nothing for `stuck_timeout_s` are
    closed by the kernel."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio's own loop sends small pieces at once only where the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError("host", f"{host} cannot be used: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stuck_timeout_s))
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError("port", f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
