"""Decides about each call, and makes those that pass to the engine in its own words."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
import structlog

from headrace_autoscaler.containers import PROJECT, ROLE, WORKER_ROLE, WorkerContainer, is_worker_of, read_container
from headrace_autoscaler.proxy.creation import check_generation, checked_body, read_clone
from headrace_autoscaler.proxy.engine_socket import EngineReply, EngineSocket, EngineUnavailable
from headrace_autoscaler.proxy.http_server import HttpReply, HttpRequest, refusal
from headrace_autoscaler.proxy.routes import Call, Refused, Route, flag, read_call, stop_seconds
from headrace_autoscaler.proxy.scaling import checked_scaling
from headrace_autoscaler.swarm_spec import STACK

CALL_TIMEOUT_S = 30.0
"""Creating may pull layers off a slow disk; all else takes milliseconds."""
MAX_WORKERS_READ = 256

log = structlog.get_logger(__name__)


class Gatekeeper:
    def __init__(self, engine: EngineSocket, project: str, max_managed: int, with_swarm: bool) -> None:
        self._engine = engine
        self._project = project
        self._max_managed = max_managed
        self._with_swarm = with_swarm
        self._changing = asyncio.Lock()
        """One creation at a time: each counts what is there."""
        self._newest_generation = 0

    async def handle(self, request: HttpRequest) -> HttpReply:
        """Never raises: whatever goes wrong is an answer."""
        try:
            call = read_call(request.method, request.target, len(request.body), self._with_swarm)
            reply = await self._pass(call, request)
        except Refused as error:
            log.warning("refused", method=request.method, target=request.target[:200], reason=str(error))
            return refusal(error.status, str(error))
        except EngineUnavailable as error:
            log.warning("engine unavailable", reason=str(error))
            return refusal(503, str(error))
        return HttpReply(reply.status, reply.body, reply.content_type, reply.headers)

    async def _pass(self, call: Call, request: HttpRequest) -> EngineReply:
        match call.route:
            case Route.PING | Route.VERSION:
                return await self._engine.call(request.method, f"{call.prefix}/{_PATHS[call.route]}")
            case Route.LIST:
                return await self._list(call.prefix)
            case Route.INSPECT:
                return await self._inspect(call)
            case Route.CREATE:
                return await self._create(call, _json(request.body))
            case Route.START:
                return await self._on_managed(call, "POST", "/start")
            case Route.STOP:
                seconds = stop_seconds(call)
                return await self._on_managed(call, "POST", f"/stop?t={seconds}", CALL_TIMEOUT_S + seconds)
            case Route.REMOVE:
                if flag(call, "link"):
                    raise Refused("link: there are no links here")
                query = urlencode({"v": int(flag(call, "v")), "force": int(flag(call, "force"))})
                return await self._on_managed(call, "DELETE", f"?{query}")
            case Route.SERVICES | Route.TASKS:
                label = [f"{STACK}={self._project}", f"{ROLE}={WORKER_ROLE}"]
                query = urlencode({"filters": msgspec.json.encode({"label": label}).decode()})
                return await self._engine.call("GET", f"{call.prefix}/{call.route.value}?{query}")
            case Route.SCALE:
                return await self._scale(call, _json(request.body))

    async def _list(self, prefix: str) -> EngineReply:
        """The project's workers in whatever state, whatever was asked for."""
        label = [f"{PROJECT}={self._project}", f"{ROLE}={WORKER_ROLE}"]
        query = urlencode({"all": 1, "filters": msgspec.json.encode({"label": label}).decode()})
        return await self._engine.call("GET", f"{prefix}/containers/json?{query}")

    async def _inspect(self, call: Call) -> EngineReply:
        reply = await self._engine.call("GET", f"{call.prefix}/containers/{call.subject}/json")
        if reply.status == 200 and not is_worker_of(_labels(reply), self._project):
            raise Refused(f"{call.subject} is no worker of this project")
        return reply

    async def _create(self, call: Call, given: Any) -> EngineReply:
        clone = read_clone(given)
        async with self._changing:
            check_generation(clone.generation, self._newest_generation)
            containers = await self._containers(call.prefix)
            name = call.query.get("name", "")
            body = checked_body(self._project, containers, self._max_managed, name, clone, given)
            self._newest_generation = max(self._newest_generation, clone.generation)
            query = urlencode({"name": name})
            reply = await self._engine.call(
                "POST", f"{call.prefix}/containers/create?{query}", body, timeout_s=CALL_TIMEOUT_S
            )
        log.info("created", container=name, generation=clone.generation, status=reply.status)
        return reply

    async def _on_managed(self, call: Call, method: str, rest: str, timeout_s: float = CALL_TIMEOUT_S) -> EngineReply:
        """On a container that an autoscaler has made. It is named by its full id, so that no other can slip in."""
        found = await self._engine.call("GET", f"{call.prefix}/containers/{call.subject}/json")
        if found.status != 200:
            return found
        container = _read(found)
        if not is_worker_of(container.labels, self._project) or not container.is_managed:
            raise Refused(f"{call.subject} was not started by the autoscaler of this project")
        target = f"{call.prefix}/containers/{container.id}{rest}"
        reply = await self._engine.call(method, target, timeout_s=timeout_s)
        log.info("passed", call=call.route.value, container=container.name, status=reply.status)
        return reply

    async def _scale(self, call: Call, given: Any) -> EngineReply:
        version = call.query.get("version", "")
        if not (version.isascii() and version.isdigit() and len(version) < 20):
            raise Refused("version: a number is wanted", 400)
        async with self._changing:
            found = await self._engine.call("GET", f"{call.prefix}/services/{call.subject}")
            if found.status != 200:
                return found
            service, name, current = _read_service(found)
            # A version that is no longer the current one is refused by the engine.
            spec = checked_scaling(self._project, current, self._max_managed, given)
            target = f"{call.prefix}/services/{service}/update?version={version}"
            reply = await self._engine.call("POST", target, spec, timeout_s=CALL_TIMEOUT_S)
        log.info("scaled", service=name, mode=spec["Mode"], status=reply.status)
        return reply

    async def _containers(self, prefix: str) -> list[WorkerContainer]:
        listed = await self._list(prefix)
        if listed.status != 200:
            raise EngineUnavailable(f"the engine does not list its containers: {listed.status}")
        ids = _read_ids(listed)
        if len(ids) > MAX_WORKERS_READ:
            raise Refused(f"this project has {len(ids)} worker containers; remove those that have ended")
        containers = []
        for container_id in ids:
            reply = await self._engine.call("GET", f"{prefix}/containers/{container_id}/json")
            if reply.status == 200:  # else it has gone meanwhile
                containers.append(_read(reply))
        return [container for container in containers if is_worker_of(container.labels, self._project)]


_PATHS: Mapping[Route, str] = {Route.PING: "_ping", Route.VERSION: "version"}


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused("the body is no JSON", 400) from error


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise EngineUnavailable(f"the engine describes {what} in an unknown way: {error!r}") from error


def _read(reply: EngineReply) -> WorkerContainer:
    with _reading("a container"):
        return read_container(msgspec.json.decode(reply.body))


def _read_ids(reply: EngineReply) -> list[str]:
    with _reading("its containers"):
        return [str(item["Id"]) for item in msgspec.json.decode(reply.body)]


def _read_service(reply: EngineReply) -> tuple[str, str, Mapping[str, Any]]:
    """(id, name, specification)"""
    with _reading("a service"):
        service = msgspec.json.decode(reply.body)
        return str(service["ID"]), str(service["Spec"]["Name"]), dict(service["Spec"])


def _labels(reply: EngineReply) -> Mapping[str, str]:
    return _read(reply).labels
