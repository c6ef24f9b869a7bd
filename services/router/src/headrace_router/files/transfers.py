"""How many files are on their way at once: each holds some pieces in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace_router.admission import retry_after
from headrace_shared.errors import Overloaded


class Transfers:
    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._running: dict[str, int] = {}
        """By owner."""

    @contextmanager
    def one(self, owner: str) -> Iterator[None]:
        """Raises Overloaded."""
        own = self._running.get(owner, 0)
        if own >= self._most_of_one or sum(self._running.values()) >= self._most:
            raise Overloaded("Too many files are on their way.", retry_after_s=retry_after(2.0))
        self._running[owner] = own + 1
        try:
            yield
        finally:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
