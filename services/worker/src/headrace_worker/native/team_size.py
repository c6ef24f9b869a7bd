"""Whether one thread or two compute an iteration of few rows, where there are two. Pure.

Few rows take as long as the memory takes to bring the weights, and often one thread gets nearly as much from it.
Threads wait for each other a hundred times in an iteration; where other processes use the same cores, each turn that
one of them takes holds up all, while with a core left to them they hold up nobody. Which is faster depends on the
machine and on what else runs there now, so it is measured: what is slower has a turn now and then. What is computed
does not depend on the number of threads.
"""

MOST_ROWS = 16
"""With more, arithmetic takes longer than the memory."""
OFTEN, SELDOM = 16, 256
"""Iterations from one trial to the next: few after a change, twice as many after each trial that brought none."""
_NEW = 0.25
"""Weight of a new measurement."""


class _Measured:
    """Iterations of about as many rows."""

    def __init__(self) -> None:
        self.best = 2
        self.average_s: dict[int, float] = {}
        self.period = OFTEN
        self.until_trial = OFTEN


class TeamSize:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def choose(self, num_rows: int, num_threads: int) -> int:
        """For the next iteration, with `num_threads` at most."""
        measured = self._of(num_rows, num_threads)
        if measured is None:
            return num_threads
        measured.until_trial -= 1
        return measured.best if measured.until_trial > 0 else 3 - measured.best

    def observe(self, num_rows: int, num_threads: int, chosen: int, elapsed_s: float) -> None:
        """`chosen` threads took so long."""
        measured = self._of(num_rows, num_threads)
        if measured is None:
            return
        average_s = measured.average_s
        before_s = average_s.setdefault(chosen, elapsed_s)
        average_s[chosen] = before_s + _NEW * (elapsed_s - before_s)
        if len(average_s) < 2:
            return
        fastest = min(average_s, key=lambda size: average_s[size])
        is_trial = chosen != measured.best
        if fastest != measured.best:
            measured.best, measured.period = fastest, OFTEN
            measured.until_trial = OFTEN
        elif is_trial:
            measured.period = min(2 * measured.period, SELDOM)
            measured.until_trial = measured.period

    def _of(self, num_rows: int, num_threads: int) -> _Measured | None:
        # Only a team of one costs no change: GNU OpenMP ends the threads that a smaller team leaves out, with their
        # buffers, and starts new ones for the next region of all, such as sampling's.
        if num_threads != 2 or num_rows > MOST_ROWS:
            return None
        size = num_rows.bit_length()
        if size not in self._measured:
            self._measured[size] = _Measured()
        return self._measured[size]
