"""`headrace init`: makes the secrets that broker and services share, as files.

    DIR/router/user.nk       one folder for each service, and `operator` for the commands: its key at the broker,
    DIR/router/ca.pem        and with --tls the authority by which it knows the broker
    DIR/broker/…             what the broker is to include: who may do what, and with --tls its certificate
    DIR/ca/…                 the authority itself: of use for nothing but further certificates

Each service gets its own folder and nothing else. What is there is kept, so that this may be run before each start;
only what follows from the rest, such as the broker's list of permissions, is written again.
"""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from headrace_cli.certificates import Pair, is_good, new_authority, new_certificate, utc_now
from headrace_shared.broker_config import TlsFiles, authorization, cluster, tls
from headrace_shared.broker_credentials import ensure_keys
from headrace_shared.broker_permissions import Role
from headrace_shared.errors import ConfigError
from headrace_shared.secret_files import ensure_private_folder, read_secret, write_secret
from headrace_shared.settings import load_settings

ACCESS_FILE = "access.conf"
CLUSTER_FILE = "cluster.conf"
ROUTE_PASSWORD_FILE = "route-password"
AUTHORITY_FILE = "ca.pem"
Hosts = Annotated[tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9.:_-]{1,253}$")], ...], Meta(max_length=64)]


class InitSettings(Struct, frozen=True, kw_only=True):
    dir: str = "secrets"
    """Folder of the secrets."""
    tls: bool = False
    """Encrypt what goes over the network: makes an authority and a certificate for the broker."""
    hosts: Hosts = ("nats", "nats-1", "nats-2", "nats-3", "localhost", "127.0.0.1")
    """With tls: names and addresses at which services reach the broker."""
    cluster: Hosts = ()
    """Hosts of the brokers of a cluster, which then know each other by a password."""
    broker_dir: str = "/run/headrace"
    """Where the broker finds the folder DIR/broker."""
    rotate: bool = False
    """Replace every key, password and certificate. Broker and services must then be started again."""


def run(argv: Sequence[str]) -> int:
    """Raises ConfigError."""
    settings = load_settings(
        InitSettings,
        argv,
        os.environ,
        prog="headrace init",
        description="Makes the keys and certificates that broker and services share, as files.",
    )
    folder = Path(settings.dir).expanduser().absolute()
    make_secrets(folder, settings)
    sys.stdout.write(f"{folder}: keys of {', '.join(Role)}{', certificates' if settings.tls else ''}\n")
    return 0


def make_secrets(folder: Path, settings: InitSettings) -> None:
    """Raises ConfigError."""
    public_keys = ensure_keys(folder, rotate=settings.rotate)
    broker = folder / "broker"
    ensure_private_folder(broker)
    access = authorization({role: [key] for role, key in public_keys.items()})
    files = None
    if settings.tls:
        _ensure_certificates(folder, settings)
        names = ("server.pem", "server-key.pem", AUTHORITY_FILE)
        files = TlsFiles(*(f"{settings.broker_dir}/{name}" for name in names))
        access += tls(files)
    write_secret(broker / ACCESS_FILE, access)
    if settings.cluster:
        password = _ensure_password(broker / ROUTE_PASSWORD_FILE, rotate=settings.rotate)
        write_secret(broker / CLUSTER_FILE, cluster(settings.cluster, password, files))


def _ensure_password(path: Path, *, rotate: bool) -> str:
    if rotate or not path.exists():
        write_secret(path, secrets.token_hex(32) + "\n")
    return read_secret(path).strip()


def _ensure_certificates(folder: Path, settings: InitSettings) -> None:
    authority_folder, broker = folder / "ca", folder / "broker"
    ensure_private_folder(authority_folder)
    authority_key, authority_file = authority_folder / "ca-key.pem", authority_folder / AUTHORITY_FILE
    now = utc_now()
    # The certificate is written last: without it the two do not count.
    if settings.rotate or not authority_file.exists():
        made = new_authority(now)
        write_secret(authority_key, made.key)
        write_secret(authority_file, made.certificate)
    certificate_file = broker / "server.pem"
    try:
        authority = Pair(read_secret(authority_key), read_secret(authority_file))
        if not certificate_file.exists() or not is_good(
            read_secret(certificate_file), authority.certificate, settings.hosts, now
        ):
            made = new_certificate(authority, settings.hosts, now)
            write_secret(broker / "server-key.pem", made.key)
            write_secret(certificate_file, made.certificate)
    except ValueError as error:
        raise ConfigError(str(authority_folder), f"not usable: {error}") from error
    for name in ("broker", *Role):
        write_secret(folder / name / AUTHORITY_FILE, authority.certificate)
