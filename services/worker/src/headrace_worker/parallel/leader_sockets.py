"""The two sockets that rank 0 listens at, bound before it exists, so that the others can be told where they are."""

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from headrace_shared.errors import ConfigError

BACKLOG = 128


class LeaderSockets(NamedTuple):
    store: socket.socket
    """For torch.distributed's store."""
    command: socket.socket

    @property
    def ports(self) -> tuple[int, int]:
        return self.store.getsockname()[1], self.command.getsockname()[1]

    @property
    def fds(self) -> tuple[int, int]:
        return self.store.fileno(), self.command.fileno()


@contextlib.contextmanager
def leader_sockets(host: str, port: int) -> Iterator[LeaderSockets]:
    """Listens at `port` and the next one, or at any two if it is 0, until the end of the block; a process that was
    started in it goes on listening. Raises ConfigError."""
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(socket.create_server((host, port), backlog=BACKLOG))
            command = stack.enter_context(socket.create_server((host, port and port + 1), backlog=BACKLOG))
        except OSError as error:
            raise ConfigError("group_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield LeaderSockets(store, command)
