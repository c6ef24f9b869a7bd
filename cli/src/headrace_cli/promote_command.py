"""`headrace promote WORKER`: a parked worker is ready again; a drain is called off."""

from collections.abc import Sequence

from headrace_cli import worker_commands
from headrace_shared.fleet_messages import CommandKind


def run(argv: Sequence[str]) -> int:
    return worker_commands.run(CommandKind.PROMOTE, argv)
