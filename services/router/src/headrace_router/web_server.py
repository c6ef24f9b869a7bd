"""uvicorn inside our own event loop: our signals, our socket, our shutdown."""

import contextlib
import math
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from headrace_router.http_protocol import BoundedHttpProtocol
from headrace_shared.errors import ConfigError

BACKLOG = 2048
KEEP_ALIVE_S = 75


class WebServer(uvicorn.Server):
    """`serve([socket])` runs until `should_exit` is set and all answers are finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The service handles them."""
        yield


def make_server(app: FastAPI, *, max_connections: int, drain_timeout_s: float) -> WebServer:
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(drain_timeout_s),
    )
    return WebServer(config)


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
