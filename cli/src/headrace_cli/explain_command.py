"""`headrace explain REQUEST`: tells what became of a request, with times."""

import asyncio
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace_cli.broker_access import BrokerSettings
from headrace_cli.flight_file import require_name, run_reader, save, take_name
from headrace_shared.settings import load_settings


class ExplainSettings(BrokerSettings, frozen=True, kw_only=True):
    file: str = ""
    """A recording saved by `headrace record`; empty: what the broker holds."""


REQUEST = (
    "REQUEST is an answer's id, such as chatcmpl-… or resp_…, or its header x-request-id if the client sent none. "
    "The broker holds the last hour at most, in memory: none of it outlives the broker. `headrace record` saves it."
)


def run(argv: Sequence[str]) -> int:
    return tell(argv, "explain", "story", f"Tells what became of a request, with times. {REQUEST}")


def tell(argv: Sequence[str], command: str, reader: str, description: str) -> int:
    """Lets one of the scheduler's programs tell of a request."""
    name, rest = take_name(argv)
    prog = f"headrace {command} REQUEST"
    settings = load_settings(ExplainSettings, rest, os.environ, prog=prog, description=description)
    require_name(name, "REQUEST")
    request_id = re.split("[-_]", name)[-1]  # answers are named chatcmpl-ID, cmpl-ID, resp_ID or msg_ID
    if settings.file:
        return run_reader(reader, settings.file, request_id)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        asyncio.run(save(settings, path))
        return run_reader(reader, str(path), request_id)
