"""`headrace park WORKER`: a worker is emptied and stays loaded, until it is promoted."""

from collections.abc import Sequence

from headrace_cli import worker_commands
from headrace_shared.fleet_messages import CommandKind


def run(argv: Sequence[str]) -> int:
    return worker_commands.run(CommandKind.PARK, argv)
