"""`headrace drain WORKER`: a worker takes nothing new, its sequences go to others, and it ends."""

from collections.abc import Sequence

from headrace_cli import worker_commands
from headrace_shared.fleet_messages import CommandKind


def run(argv: Sequence[str]) -> int:
    return worker_commands.run(CommandKind.DRAIN, argv)
