import pytest

from headrace_autoscaler.proxy.routes import Call, Refused, Route, flag, read_call, stop_seconds

ID = "a" * 64


@pytest.mark.parametrize(
    ("method", "target", "route", "subject"),
    [
        ("GET", "/_ping", Route.PING, ""),
        ("HEAD", "/_ping", Route.PING, ""),
        ("GET", "/version", Route.VERSION, ""),
        ("GET", "/v1.41/containers/json?all=1&limit=-1&size=0", Route.LIST, ""),
        ("GET", f"/v1.41/containers/{ID}/json", Route.INSPECT, ID),
        ("POST", "/v1.47/containers/create?name=headrace-worker-0a", Route.CREATE, ""),
        ("POST", f"/v1.41/containers/{ID}/start", Route.START, ID),
        ("POST", f"/v1.41/containers/{ID}/stop?t=30", Route.STOP, ID),
        ("DELETE", f"/v1.41/containers/{ID}?v=True&link=False&force=True", Route.REMOVE, ID),
    ],
)
def test_what_the_driver_needs_passes(method: str, target: str, route: Route, subject: str) -> None:
    call = read_call(method, target, 0, with_swarm=False)
    assert (call.route, call.subject) == (route, subject)


CONTAINER_ESCAPES = [
    *[
        ("POST", f"/containers/{ID}/{verb}")
        for verb in ("exec", "attach", "copy", "kill", "pause", "unpause", "restart")
    ],
    *[
        ("POST", f"/containers/{ID}/{verb}")
        for verb in ("rename?name=x", "update", "wait", "resize", "commit", "prune")
    ],
    *[
        ("GET", f"/containers/{ID}/{verb}")
        for verb in ("export", "logs?follow=1", "attach/ws", "archive?path=/", "top")
    ],
    *[("GET", f"/containers/{ID}/{verb}") for verb in ("stats", "changes")],
    ("HEAD", f"/containers/{ID}/archive?path=/"),
    ("PUT", f"/containers/{ID}/archive?path=/"),
    ("POST", "/containers/prune"),
    ("DELETE", "/containers/"),
    ("GET", f"/containers/{ID}"),
    ("POST", f"/containers/{ID}/start/"),
]
ENGINE_ESCAPES = [
    *[("POST", f"/{path}") for path in ("build", "build/prune", "session", "grpc", "commit", "auth", "exec/abc/start")],
    *[("POST", f"/{path}") for path in ("images/create?fromImage=x", "images/load", "images/x/push", "images/x/tag")],
    *[("POST", f"/{path}") for path in ("volumes/create", "networks/create", "networks/x/connect", "plugins/pull")],
    *[
        ("POST", f"/{path}")
        for path in ("swarm/init", "swarm/join", "secrets/create", "configs/create", "nodes/x/update")
    ],
    *[
        ("GET", f"/{path}")
        for path in ("info", "events", "images/json", "images/x/get", "volumes", "networks", "secrets")
    ],
    *[
        ("GET", f"/{path}")
        for path in ("system/df", "swarm", "swarm/unlockkey", "nodes", "plugins", "exec/abc/json", "")
    ],
    *[("GET", f"/{path}") for path in ("services", "tasks", "services/x", "configs", "distribution/x/json")],
    *[("DELETE", f"/{path}") for path in ("images/x", "volumes/x", "networks/x", "services/x", "plugins/x")],
    ("POST", "/services/create"),
    ("POST", "/services/x/update?version=1"),
]


@pytest.mark.parametrize(("method", "path"), CONTAINER_ESCAPES + ENGINE_ESCAPES)
@pytest.mark.parametrize("prefix", ["", "/v1.41"])
def test_every_other_call_of_the_api_is_refused(method: str, path: str, prefix: str) -> None:
    with pytest.raises(Refused) as refused:
        read_call(method, prefix + path, 0, with_swarm=False)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "target",
    [
        f"/containers/{ID}/../{ID}/exec",
        f"/containers/{ID}/json/../../../images/json",
        f"/containers/{ID}%2fexec/json",
        f"/containers/{ID}%00/json",
        f"//containers/{ID}/json",
        f"/containers//{ID}/json",
        f"/containers/{ID}/json#/exec",
        f"/containers/{ID}/json;x=/exec",
        "/containers/../json",
        "/containers/./json",
        f"/v1.41/v1.41/containers/{ID}/json",
        f"/v2/containers/{ID}/json",
        f"/v1.99999/containers/{ID}/json",
        f"http://docker/containers/{ID}/json",
        f"/containers/{ID}/json\t",
        "*",
        "",
    ],
)
def test_a_path_that_the_engine_might_read_otherwise_is_refused(target: str) -> None:
    with pytest.raises(Refused):
        read_call("GET", target, 0, with_swarm=False)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", f"/containers/{ID}/start?detachKeys=x"),
        ("POST", f"/containers/{ID}/start?checkpoint=x&checkpoint-dir=/"),
        ("POST", f"/containers/{ID}/stop?signal=SIGUSR1"),
        ("POST", f"/containers/{ID}/stop?t=1&t=2"),
        ("POST", f"/containers/{ID}/stop?t=1&t%20=2"),
        ("POST", "/containers/create?name=a&platform=windows"),
        ("GET", f"/containers/{ID}/json?size=1"),
    ],
)
def test_parameters_that_are_not_needed_are_refused(method: str, target: str) -> None:
    with pytest.raises(Refused):
        read_call(method, target, 0, with_swarm=False)


def test_only_a_creation_has_a_body() -> None:
    with pytest.raises(Refused, match="has no body"):
        read_call("POST", f"/containers/{ID}/start", 2, with_swarm=False)
    assert read_call("POST", "/containers/create?name=x", 100, with_swarm=False).route is Route.CREATE


def test_paths_have_a_bounded_length() -> None:
    with pytest.raises(Refused) as refused:
        read_call("GET", "/containers/json?" + "a" * 4096, 0, with_swarm=False)
    assert refused.value.status == 414


@pytest.mark.parametrize("grace", ["-1", "3601", "1e3", "99999", "", " 1", "１"])
def test_a_stop_is_bounded(grace: str) -> None:
    with pytest.raises(Refused, match="t: a number of seconds up to 3600"):
        stop_seconds(Call(Route.STOP, "", ID, {"t": grace}))


def test_flags_are_words_that_everybody_reads_alike() -> None:
    assert flag(Call(Route.REMOVE, "", ID, {"v": "True"}), "v")
    assert not flag(Call(Route.REMOVE, "", ID, {}), "v")
    with pytest.raises(Refused, match="true or false"):
        flag(Call(Route.REMOVE, "", ID, {"v": "nope"}), "v")


def test_swarm_calls_pass_only_where_they_are_wanted() -> None:
    assert read_call("GET", "/services", 0, with_swarm=True).route is Route.SERVICES
    assert read_call("POST", "/services/abc/update?version=7", 90, with_swarm=True).route is Route.SCALE
    for method, target in [("POST", "/services/create"), ("DELETE", "/services/abc"), ("GET", "/nodes")]:
        with pytest.raises(Refused):
            read_call(method, target, 0, with_swarm=True)
