"""Commands that ask the broker itself: where it is, and a connection to it."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from headrace_cli.errors import CommandError
from headrace_cli.ps_command import find_instances
from headrace_cli.state_file import readable
from headrace_cli.up import BROKER_URL_FILE, CREDENTIALS_FOLDER
from headrace_shared.broker_credentials import key_path
from headrace_shared.broker_permissions import Role
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
    broker_credentials: str = ""
    """File with the operator's key at the broker; empty: that of the running instance."""
    broker_ca: str = ""
    """File with the authority that has signed the broker's certificate; with it, everything is encrypted."""
    data_dir: str = ""
    """Of the instance whose broker is meant; empty: the only one that runs."""


class _Place(NamedTuple):
    url: str
    credentials: str


@asynccontextmanager
async def broker(settings: BrokerSettings) -> AsyncIterator[NatsBus]:
    """Raises CommandError if there is none to be found, or if it does not answer, also within the block."""
    place = _Place(settings.nats_url, settings.broker_credentials)
    if not place.url:
        place = _place_of_instance(settings.data_dir, os.environ)
    bus = None
    try:
        bus = await NatsBus.connect(
            [part.strip() for part in place.url.split(",")],
            name="headrace-command",
            on_closed=lambda: None,
            user=settings.nats_user or None,
            password=settings.nats_password or None,
            role=Role.OPERATOR,
            credentials=place.credentials,
            authority=settings.broker_ca if settings.nats_url else "",
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        yield bus
    except BusError as error:
        raise CommandError(f"the broker does not answer: {error}") from error
    finally:
        if bus is not None:
            await bus.close()


def _place_of_instance(data_dir: str, environ: Mapping[str, str]) -> _Place:
    folders = [Path(instance.data_dir) for instance in find_instances(data_dir, environ)]
    if len(folders) != 1:
        found = f"several instances run ({', '.join(map(readable, folders))})" if folders else "no instance runs"
        if data_dir:
            found += f" in {data_dir}"
        raise CommandError(found, "name a broker with --nats-url, or an instance with --data-dir")
    [folder] = folders
    try:
        url = (folder / BROKER_URL_FILE).read_text().strip()
    except OSError as error:
        raise CommandError(f"the broker of {folder} is not known: {error}") from error
    return _Place(url, str(key_path(folder / CREDENTIALS_FOLDER, Role.OPERATOR)))
