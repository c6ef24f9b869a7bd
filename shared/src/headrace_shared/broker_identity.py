"""Who we are at the broker, and how we know that it is the one."""

import base64
import ssl
from pathlib import Path
from typing import NamedTuple

from headrace_shared.broker_permissions import DIRECT_READERS, MAKERS, Role, inbox_prefix
from headrace_shared.errors import ConfigError
from headrace_shared.secret_files import read_secret


class BrokerIdentity(NamedTuple):
    """By an nkey, or by name and password; neither for a broker that lets everybody in."""

    role: Role | None = None
    key_file: str = ""
    """Read again for each connection, so that a key may be replaced."""
    authority_file: str = ""
    """Certificates (PEM) one of which has signed the broker's; then nothing is sent without encryption."""
    user: str = ""
    password: str = ""

    @property
    def inbox_prefix(self) -> str:
        return "_INBOX" if self.role is None else inbox_prefix(self.role)

    @property
    def may_make_streams(self) -> bool:
        """False only where our own broker would refuse it: where users have passwords, others have set it up."""
        return not self.key_file or self.role in MAKERS

    @property
    def reads_directly(self) -> bool:
        """As `may_make_streams`."""
        return not self.key_file or self.role in DIRECT_READERS

    def load(self) -> "LoadedIdentity":
        """Reads the files. Raises ConfigError."""
        return LoadedIdentity(self._signer(), self._tls())

    def _signer(self) -> "Signer | None":
        if not self.key_file:
            return None
        try:
            return Signer(read_secret(Path(self.key_file)))
        except ValueError as error:
            raise ConfigError("broker_credentials", f"{self.key_file}: {error}") from error

    def _tls(self) -> ssl.SSLContext | None:
        if not self.authority_file:
            return None
        try:
            context = ssl.create_default_context(cafile=self.authority_file)
        except OSError as error:
            raise ConfigError("broker_ca", f"cannot use {self.authority_file}: {error.strerror or error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context


class Signer:
    def __init__(self, seed: str) -> None:
        """Raises ValueError."""
        # Only now: services of brokers without nkeys need not wait for the library.
        from headrace_shared import nkeys

        self._sign = nkeys.sign
        self._seed = seed
        self.public_key = nkeys.public_key_of(seed)

    def __repr__(self) -> str:
        return f"Signer({self.public_key})"

    def __call__(self, nonce: str) -> bytes:
        """Of the broker's nonce, as base64."""
        return base64.b64encode(self._sign(self._seed, nonce.encode()))


class LoadedIdentity(NamedTuple):
    signer: Signer | None
    tls: ssl.SSLContext | None
