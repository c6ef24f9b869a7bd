"""Which commands are taken at all: those of now that were not seen before. Pure.

The broker lets only the autoscaler and the operator command. What this adds: a command that somebody kept cannot be
said again, neither by a compromised service nor by a broker that delivers twice.
"""

from collections import OrderedDict

from headrace_shared.fleet_messages import WorkerCommand

MAX_AGE_S = 60.0
"""Apart from that machines' clocks may differ by so much."""
MAX_REMEMBERED = 4096
"""Far more than anybody commands within twice MAX_AGE_S."""


class CommandGuard:
    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        """Ids, and when each command was sent."""

    def problem(self, command: WorkerCommand, now: float) -> str:
        """Why it is not taken; empty if it is, which then counts as seen. `now`: seconds since the epoch."""
        if not command.command_id:
            return "it has no id"
        age_s = now - command.sent_at
        if not abs(age_s) <= MAX_AGE_S:
            return f"it was sent {age_s:.0f} s ago: it is a repetition, or the machines' clocks differ"
        if command.command_id in self._seen:
            return "it was said before"
        self._forget(now)
        if len(self._seen) >= MAX_REMEMBERED:
            return "there are too many"
        self._seen[command.command_id] = command.sent_at
        return ""

    def _forget(self, now: float) -> None:
        """Those that are too old to be taken again."""
        while self._seen and now - next(iter(self._seen.values())) > 2 * MAX_AGE_S:
            self._seen.popitem(last=False)
