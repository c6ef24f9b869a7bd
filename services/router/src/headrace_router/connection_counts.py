"""How many connections there are, in all and from each address. Pure."""

import ipaddress
from collections import Counter

_IPV6_PREFIX = 64
"""Whoever has one IPv6 address usually has all of this network."""


class ConnectionCounts:
    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._of_origin: Counter[str] = Counter()
        self._num = 0

    def enter(self, address: str) -> bool:
        """False: there is no room. Otherwise `leave` must follow."""
        origin = _origin(address)
        if self._num >= self._most or self._of_origin[origin] >= self._most_per_address:
            if not self._of_origin[origin]:
                del self._of_origin[origin]
            return False
        self._num += 1
        self._of_origin[origin] += 1
        return True

    def leave(self, address: str) -> None:
        origin = _origin(address)
        self._num -= 1
        self._of_origin[origin] -= 1
        if not self._of_origin[origin]:
            del self._of_origin[origin]

    @property
    def num_origins(self) -> int:
        return len(self._of_origin)


def _origin(address: str) -> str:
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, _IPV6_PREFIX), strict=False))
