"""Under which names a router is asked for. Pure.

A web page can point its own name at any address, 127.0.0.1 too, and then read what answers there: the browser takes it
for the page's own server (DNS rebinding). The Host header tells: it holds the page's name. Addresses, and names that
public DNS cannot hold, cannot be a page's, so they are always answered.
"""

import ipaddress
import re
from collections.abc import Sequence

from headrace_shared.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan")


class HostNames:
    def __init__(self, allowed: Sequence[str], *, listens_on: str, has_keys: bool) -> None:
        """Raises ConfigError."""
        for name in allowed:
            if name != "*" and not _NAME.fullmatch(name.removeprefix("*.")):
                raise ConfigError("allowed_hosts", f"{name!r} is no host name, *.DOMAIN or *")
        names = [name.lower().rstrip(".") for name in allowed]
        # Without a list: a page that was rebound has no key, and clients come under names that nobody has told us.
        self._admits_all = "*" in names or (not names and has_keys and not _is_loopback(listens_on))
        self._names = frozenset(name for name in names if not name.startswith("*"))
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*."))

    def admits(self, host: str) -> bool:
        """`host`: a well-formed Host header."""
        name = name_of(host)
        return self._admits_all or _is_private(name) or name in self._names or name.endswith(self._suffixes or ("\0",))


def name_of(host: str) -> str:
    """Without port, and without the dot that may end it."""
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.lower().rstrip(".")


def _is_private(name: str) -> bool:
    return _is_address(name) or "." not in name or name.endswith(_PRIVATE_SUFFIXES)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return name_of(address) == "localhost"
