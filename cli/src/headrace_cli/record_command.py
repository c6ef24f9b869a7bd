"""`headrace record FILE`: saves what the schedulers have recorded of late."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace_cli.broker_access import BrokerSettings
from headrace_cli.flight_file import require_name, save, take_name
from headrace_shared.settings import load_settings


def run(argv: Sequence[str]) -> int:
    name, rest = take_name(argv)
    settings = load_settings(
        BrokerSettings,
        rest,
        os.environ,
        prog="headrace record FILE",
        description="Saves what the schedulers have seen and done of late, prompts and answers included, for explain, "
        "trace and replay.",
    )
    require_name(name, "FILE")
    num_messages = asyncio.run(save(settings, Path(name)))
    sys.stdout.write(f"{num_messages} messages written to {name}; it holds prompts and answers as token ids.\n")
    return 0
