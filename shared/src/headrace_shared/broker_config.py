"""The part of a nats-server's configuration that says who may do what, as text. Pure.

Users are nkeys: the server gets public keys, so that its configuration holds no secret of a service. All are users of
the global account, where streams have always been; the system account has no user.
"""

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace_shared.broker_permissions import Role, permissions_of

CLUSTER_NAME = "headrace"
CLUSTER_PORT = 6222
ROUTE_USER = "route"


class TlsFiles(NamedTuple):
    """Paths on the broker's machine."""

    certificate: str
    key: str
    authority: str


def quoted(text: str) -> str:
    """A string as the configuration has it, which knows no other escapes than these. Paths may hold any bytes."""
    data = text.encode(errors="surrogateescape")
    plain = (chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\x{byte:02x}" for byte in data)
    return f'"{"".join(plain)}"'


def authorization(public_keys: Mapping[Role, Iterable[str]]) -> str:
    """Each role's keys, of which any will do. Whoever has none of them does not get in."""
    users = []
    for role, keys in public_keys.items():
        allowed = permissions_of(role)
        permissions = {"publish": {"allow": allowed.publish}, "subscribe": {"allow": allowed.subscribe}}
        users += [f"    {{nkey: {key}, permissions: {json.dumps(permissions)}}}" for key in keys]
    return "authorization {\n  timeout: 5\n  users: [\n" + "\n".join(users) + "\n  ]\n}\n"


def tls(files: TlsFiles) -> str:
    """Encryption begins before the first byte of the protocol, so that there is nothing to be talked out of."""
    return f"tls {{\n{_tls_files(files)}  handshake_first: true\n}}\n"


def cluster(members: Iterable[str], password: str, files: TlsFiles | None) -> str:
    """Who may join: servers at these hosts that know the password, and with `files` have a certificate of the same
    authority."""
    routes = ", ".join(json.dumps(f"nats://{ROUTE_USER}:{password}@{host}:{CLUSTER_PORT}") for host in members)
    encryption = "" if files is None else f"  tls {{\n{_tls_files(files)}    verify: true\n  }}\n"
    return (
        f"cluster {{\n  name: {CLUSTER_NAME}\n  port: {CLUSTER_PORT}\n  routes: [{routes}]\n"
        f"  authorization {{user: {ROUTE_USER}, password: {json.dumps(password)}, timeout: 5}}\n{encryption}}}\n"
    )


def _tls_files(files: TlsFiles) -> str:
    named = {"cert_file": files.certificate, "key_file": files.key, "ca_file": files.authority}
    return "".join(f"    {name}: {quoted(path)}\n" for name, path in named.items()) + '    min_version: "1.3"\n'
