"""Which calls of the Docker Engine API pass at all, by method and path. Pure.

What is not listed is refused: there is no way to exec, attach, build, commit, export, copy files, pull, read logs or
events, or reach networks, volumes, plugins, secrets and nodes.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple
from urllib.parse import parse_qsl

MAX_TARGET = 2048
MAX_STOP_S = 3600


class Route(Enum):
    PING = "ping"
    VERSION = "version"
    LIST = "list"
    INSPECT = "inspect"
    CREATE = "create"
    START = "start"
    STOP = "stop"
    REMOVE = "remove"
    SERVICES = "services"
    TASKS = "tasks"
    SCALE = "scale"


class Call(NamedTuple):
    route: Route
    prefix: str
    """The version, as in /v1.41; may be empty."""
    subject: str
    """Name or id of the container or service; empty where there is none."""
    query: Mapping[str, str]


class Refused(Exception):
    """What the caller is told: `status` and one line."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


class _Rule(NamedTuple):
    method: str
    path: re.Pattern[str]
    route: Route
    query: frozenset[str] | None
    """Parameters that may be there; None: any, since none is passed on."""
    is_swarm: bool = False


_SUBJECT = r"(?P<subject>[A-Za-z0-9][A-Za-z0-9_.-]{0,127})"
_TARGET = re.compile(r"(?P<prefix>/v1\.[0-9]{1,3})?(?P<path>/[A-Za-z0-9_./-]*)(?:\?(?P<query>[!-~]*))?")


def _rule(method: str, path: str, route: Route, *query: str, is_swarm: bool = False) -> _Rule:
    return _Rule(method, re.compile(path), route, frozenset(query), is_swarm)


_RULES = (
    _rule("GET", "/_ping", Route.PING),
    _rule("HEAD", "/_ping", Route.PING),
    _rule("GET", "/version", Route.VERSION),
    _rule("GET", "/containers/json", Route.LIST)._replace(query=None),
    _rule("GET", f"/containers/{_SUBJECT}/json", Route.INSPECT),
    _rule("POST", "/containers/create", Route.CREATE, "name"),
    _rule("POST", f"/containers/{_SUBJECT}/start", Route.START),
    _rule("POST", f"/containers/{_SUBJECT}/stop", Route.STOP, "t"),
    _rule("DELETE", f"/containers/{_SUBJECT}", Route.REMOVE, "v", "force", "link"),
    _rule("GET", "/services", Route.SERVICES, is_swarm=True)._replace(query=None),
    _rule("GET", "/tasks", Route.TASKS, is_swarm=True)._replace(query=None),
    _rule("POST", f"/services/{_SUBJECT}/update", Route.SCALE, "version", is_swarm=True),
)


def read_call(method: str, target: str, num_body_bytes: int, with_swarm: bool) -> Call:
    """Raises Refused."""
    if len(target) > MAX_TARGET:
        raise Refused("the path is too long", 414)
    match = _TARGET.fullmatch(target)
    # No encoded characters, no dots and no doubled slashes: the engine must not read another path than this one.
    if match is None or "//" in match["path"] or ".." in match["path"].split("/"):
        raise Refused("not a path that passes here")
    path = match["path"]
    for rule in _RULES:
        found = rule.path.fullmatch(path)
        if found is None or rule.method != method or (rule.is_swarm and not with_swarm):
            continue
        if num_body_bytes and rule.route not in (Route.CREATE, Route.SCALE):
            raise Refused(f"{method} {path} has no body")
        query = _read_query(match["query"] or "", rule)
        return Call(rule.route, match["prefix"] or "", found.groupdict().get("subject", ""), query)
    raise Refused(f"{method} {path} is not allowed")


def stop_seconds(call: Call) -> int:
    """The grace of a stop. Raises Refused."""
    text = call.query.get("t", "10")
    if re.fullmatch(r"[0-9]{1,4}", text) is None or int(text) > MAX_STOP_S:
        raise Refused(f"t: a number of seconds up to {MAX_STOP_S} is wanted", 400)
    return int(text)


def flag(call: Call, name: str) -> bool:
    """Raises Refused."""
    text = call.query.get(name, "false").lower()
    if text not in ("0", "1", "false", "true"):
        raise Refused(f"{name}: true or false is wanted", 400)
    return text in ("1", "true")


def _read_query(text: str, rule: _Rule) -> dict[str, str]:
    if rule.query is None:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=8)
    except ValueError as error:
        raise Refused("the query is malformed", 400) from error
    query = dict(pairs)
    unknown = sorted(set(query) - rule.query)
    if unknown or len(query) != len(pairs):
        raise Refused(f"query parameter {unknown[0][:40] if unknown else 'given twice'} is not allowed")
    return query
