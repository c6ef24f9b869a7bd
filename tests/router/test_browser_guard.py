"""Other people's web pages get no answer out of this server, and make it do nothing."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace_router.browser_guard import Origins
from headrace_router.host_names import HostNames
from headrace_router.settings import RouterSettings
from headrace_shared.errors import ConfigError
from tests.byte_model import MODEL
from tests.router.support import Router, running_router, says

BODY = {"model": MODEL, "prompt": "a"}
PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def guarded(**changes: Any) -> AsyncIterator[Router]:
    settings = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, **changes)
    async with running_router(says("ok"), settings=settings) as router:
        yield router


async def test_a_name_that_was_pointed_here_is_refused_by_its_name() -> None:
    async with guarded(allowed_hosts=("llm.example.com", "*.corp.example")) as router:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "a.b"):
            for method, path in (("GET", "/v1/models"), ("POST", PATH), ("GET", "/metrics"), ("GET", "/dashboard")):
                reply = await router.client.request(method, path, headers={"host": host})
                assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed"), (host, path)
            for path in ("/live", "/health"):
                assert (await router.client.get(path, headers={"host": host})).status_code != 403, (
                    "probes have any name"
                )
        for host in ("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:8000", "[::1]:8000", "192.168.1.7", "router"):
            assert (await router.client.get("/v1/models", headers={"host": host})).status_code == 200, host
        for host in ("llm.example.com", "llm.example.com.:8000", "a.corp.example"):
            assert (await router.client.get("/v1/models", headers={"host": host})).status_code == 200, host
        assert 'code="host_not_allowed"' in (await router.client.get("/metrics")).text


@pytest.mark.parametrize(
    ("listens_on", "has_keys", "allowed", "admits"),
    [
        ("127.0.0.1", False, (), False),
        ("127.0.0.1", True, (), False),
        ("::1", True, (), False),
        ("localhost", True, (), False),
        ("0.0.0.0", False, (), False),
        ("0.0.0.0", True, (), True),
        ("0.0.0.0", True, ("other.example",), False),
        ("127.0.0.1", False, ("*",), True),
    ],
)
def test_public_names_are_answered_only_where_a_page_could_not_use_them(
    listens_on: str, has_keys: bool, allowed: tuple[str, ...], admits: bool
) -> None:
    names = HostNames(allowed, listens_on=listens_on, has_keys=has_keys)
    assert names.admits("page.example") is admits
    assert names.admits("localhost:8000") and names.admits("10.1.2.3") and names.admits("router.namespace.local")


@pytest.mark.parametrize("name", ["http://x", "x:80", "a*", "", "*.", "x y"])
def test_what_is_no_name_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        HostNames((name,), listens_on="0.0.0.0", has_keys=False)


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://", "1tp://x", "javascript:x", "null", ""]
)
def test_what_is_no_origin_stops_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        Origins((origin,), has_keys=True)


@pytest.mark.parametrize(
    "origin", ["tauri://localhost", "capacitor://localhost", "app://obsidian.md", "chrome-extension://abcdefghij"]
)
def test_applications_and_extensions_can_be_listed(origin: str) -> None:
    assert Origins((origin,), has_keys=False).has(origin)


def test_all_origins_need_keys() -> None:
    assert Origins(("*",), has_keys=True).has("https://any.example")
    with pytest.raises(ConfigError, match="require_keys"):
        Origins(("*",), has_keys=False)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://"])
async def test_pages_of_other_origins_do_nothing_and_read_nothing(origin: str) -> None:
    """Also with what browsers send without asking: forms, plain text, and bodies without a type."""
    async with guarded() as router:
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded", ""):
            headers = {"origin": origin, "sec-fetch-site": "cross-site", **({"content-type": kind} if kind else {})}
            reply = await router.client.post(PATH, content=b'{"model": "tiny", "prompt": "a"}', headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
        for path in ("/v1/requests/" + "0" * 32 + "/cancel", "/dashboard/api/flood"):
            assert (await router.client.post(path, headers={"origin": origin})).status_code == 403
        asked = {"origin": origin, "access-control-request-method": "POST"}
        for reply in (
            await router.client.options(PATH, headers=asked),
            await router.client.get("/live", headers=asked),
        ):
            assert not [name for name in reply.headers if name.startswith("access-control")]
        assert router.worker.requests == []


async def test_plain_text_is_refused_from_anybody() -> None:
    async with guarded() as router:
        for kind in ("text/plain", "text/plain; application/json", "multipart/form-data", "application/xml"):
            reply = await router.client.post(PATH, content=b'{"model": "tiny"}', headers={"content-type": kind})
            assert reply.status_code == 415, kind
        for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON"):
            reply = await router.client.post(PATH, json=BODY, headers={"content-type": kind})
            assert reply.status_code == 200, kind


async def test_own_pages_and_listed_ones_are_answered() -> None:
    async with guarded(cors_origins=("https://app.example",)) as router:
        own = f"http://127.0.0.1:{router.port}"
        for headers in ({"origin": own}, {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"}):
            reply = await router.client.post(PATH, json=BODY, headers=headers)
            assert reply.status_code == 200 and "access-control-allow-origin" not in reply.headers
        reply = await router.client.post(PATH, json=BODY, headers={"origin": "https://app.example"})
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        assert reply.headers["vary"] == "origin" and reply.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
        preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
        reply = await router.client.options(PATH, headers=preflight)
        assert reply.status_code == 204 and "authorization" in reply.headers["access-control-allow-headers"]
        preflight["origin"] = "https://app.example.evil"
        assert (await router.client.options(PATH, headers=preflight)).status_code == 405


async def test_a_listed_page_needs_a_key_where_keys_are_required() -> None:
    async with guarded(cors_origins=("https://app.example",), require_keys=True) as router:
        headers = {"origin": "https://app.example"}
        reply = await router.client.post(PATH, json=BODY, headers=headers)
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "https://app.example", "the page may read why"
