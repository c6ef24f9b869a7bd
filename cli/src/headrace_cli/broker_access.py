"""Commands that ask the broker itself: where it is, and a connection to it."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from headrace_cli.errors import CommandError
from headrace_cli.ps_command import find_instances
from headrace_cli.up import BROKER_URL_FILE
from headrace_shared.errors import BusError
from headrace_shared.nats_bus import NatsBus
from headrace_shared.settings import Secret

CONNECT_TIMEOUT_S = 5.0


class BrokerSettings(Struct, frozen=True, kw_only=True):
    nats_url: str = ""
    """Address of the broker; empty: that of the running instance."""
    nats_user: str = ""
    """User name at the broker."""
    nats_password: Secret = ""
    """Password at the broker."""
    data_dir: str = ""
    """Of the instance whose broker is meant; empty: the only one that runs."""


@asynccontextmanager
async def broker(settings: BrokerSettings) -> AsyncIterator[NatsBus]:
    """Raises CommandError if there is none to be found, or if it does not answer, also within the block."""
    url = settings.nats_url or _url_of_instance(settings.data_dir, os.environ)
    bus = None
    try:
        bus = await NatsBus.connect(
            [part.strip() for part in url.split(",")],
            name="headrace-command",
            on_closed=lambda: None,
            user=settings.nats_user or None,
            password=settings.nats_password or None,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        yield bus
    except BusError as error:
        raise CommandError(f"the broker does not answer: {error}") from error
    finally:
        if bus is not None:
            await bus.close()


def _url_of_instance(data_dir: str, environ: Mapping[str, str]) -> str:
    folders = [Path(instance.data_dir) for instance in find_instances(data_dir, environ)]
    if len(folders) != 1:
        found = "several instances run" if folders else "no instance runs"
        raise CommandError(found, "name a broker with --nats-url, or an instance with --data-dir")
    try:
        return (folders[0] / BROKER_URL_FILE).read_text().strip()
    except OSError as error:
        raise CommandError(f"the broker of {folders[0]} is not known: {error}") from error
