"""Flight recordings as files: what the schedulers have told the broker of late, and the programs that read it."""

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from headrace_cli.broker_access import BrokerSettings, broker
from headrace_cli.errors import CommandError
from headrace_shared.errors import BusError, ConfigError
from headrace_shared.python_module import python_module
from headrace_shared.subjects import ALL_FLIGHTS, FLIGHT

LENGTH = struct.Struct(">I")
MAX_MESSAGES = 1_000_000


async def save(settings: BrokerSettings, path: Path) -> int:
    """Writes all that the broker still holds; returns the number of messages. Raises CommandError."""
    async with broker(settings) as bus:
        try:
            is_empty = not await bus.num_messages(FLIGHT.name)
        except BusError as error:
            if not bus.is_connected:
                raise
            raise CommandError(f"the broker holds no recording: {error}") from error
        messages = [] if is_empty else await bus.read(FLIGHT.name, ALL_FLIGHTS, MAX_MESSAGES)
    if not messages:
        raise CommandError("the broker holds no recording", "schedulers record unless --no-flight-recorder is set")
    try:
        with path.open("wb") as file:
            for message in messages:
                file.write(LENGTH.pack(len(message.data)) + message.data)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}") from error
    return len(messages)


def run_reader(module: str, *arguments: str) -> int:
    """Runs a program of the scheduler's on a recording; returns its exit code."""
    return subprocess.run(python_module(f"headrace_scheduler.{module}", *arguments)).returncode


def take_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The first argument, if it is no flag, and the rest, among which a wrong flag is found first."""
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return "", list(argv)


def require_name(name: str, what: str) -> None:
    """Raises ConfigError if it was not given."""
    if not name:
        raise ConfigError(what, "is missing")
