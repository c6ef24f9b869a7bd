"""Where the other machines of a group reach this one."""

import socket
import struct
import sys
from urllib.parse import urlsplit

from headrace_shared.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def address_toward(nats_url: str) -> str:
    """This machine's own address on the way to the broker. Nothing is sent. Raises ConfigError."""
    broker = urlsplit(nats_url.split(",")[0].strip())
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((broker.hostname or "127.0.0.1", broker.port or 4222))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ConfigError("group_host", f"no way to {broker.hostname}: {error.strerror or error}; set it") from error


def interface_of(host: str) -> str | None:
    """The network interface that has this name or address; None if none has, or the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
            except OSError:
                continue  # it has no IPv4 address
    return None


def interface_environ(host: str) -> dict[str, str]:
    """Makes gloo and NCCL use the interface of `host`; else they go by this machine's name, or guess."""
    interface = interface_of(host)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
