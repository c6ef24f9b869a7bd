"""Who gets in, in virtual time."""

from typing import Protocol

from headrace_simulator.cluster import Load


class Gate(Protocol):
    def admit(self, num_arrived: int, load: Load, num_ready: int, now: float) -> int:
        """How many of the requests that come in this step get in, the first ones; the others are shed."""
        ...

    def on_step(self, num_first_tokens: int) -> None:
        """Told after each step how many requests got their first token in it."""
        ...


class Open:
    """Everybody gets in and waits as long as it takes."""

    def admit(self, num_arrived: int, load: Load, num_ready: int, now: float) -> int:
        return num_arrived

    def on_step(self, num_first_tokens: int) -> None:
        pass
