"""`headrace replay FILE`: runs a recording through the scheduler's core again and compares every decision."""

import os
from collections.abc import Sequence

from msgspec import Struct

from headrace_cli.flight_file import require_name, run_reader, take_name
from headrace_shared.settings import load_settings


class ReplaySettings(Struct, frozen=True, kw_only=True):
    """Nothing can be set."""


def run(argv: Sequence[str]) -> int:
    name, rest = take_name(argv)
    load_settings(
        ReplaySettings,
        rest,
        os.environ,
        prog="headrace replay FILE",
        description="Runs what `headrace record` has saved through the scheduler again, and compares every decision.",
    )
    require_name(name, "FILE")
    return run_reader("replay", name)
