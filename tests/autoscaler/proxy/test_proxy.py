"""The proxy over real sockets; what stands for the engine remembers what reached it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_autoscaler.container_spec import clone_body
from headrace_autoscaler.proxy import http_server
from headrace_autoscaler.proxy.engine_socket import MAX_REPLY_BYTES
from headrace_autoscaler.proxy.http_server import MAX_BODY_BYTES, MAX_CONNECTIONS
from tests.autoscaler.inspections import clone, clone_details, worker_container, worker_details
from tests.autoscaler.proxy.scripted_engine import ScriptedEngine, running_proxy

TEMPLATE = worker_container()
MANAGED = clone_details(TEMPLATE, clone("worker-0b"))
FOREIGN = worker_details(
    {"Id": "e" * 64, "Name": "/postgres", "Config": {"Labels": {"com.docker.compose.project": "shop"}}},
    **{"com.docker.compose.project": "shop"},
)


class Proxy:
    def __init__(self, engine: ScriptedEngine, port: int) -> None:
        self.engine = engine
        self.port = port

    async def call(self, method: str, target: str, body: Any = None) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as client:
            return await client.request(method, target, json=body)

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            async with asyncio.timeout(30):
                return await reader.read()
        finally:
            writer.close()


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    engine = ScriptedEngine([worker_details(), MANAGED, FOREIGN])
    async with running_proxy(engine, tmp_path) as port:
        yield Proxy(engine, port)


async def test_a_listing_is_of_the_projects_workers_whatever_is_asked_for(proxy: Proxy) -> None:
    reply = await proxy.call(
        "GET", '/v1.41/containers/json?all=0&filters={"label":["com.docker.compose.project=shop"]}'
    )
    assert reply.status_code == 200
    [call] = proxy.engine.received
    assert (call.path, call.query["all"]) == ("/v1.41/containers/json", ["1"])
    assert json.loads(call.query["filters"][0]) == {
        "label": ["com.docker.compose.project=headrace", "com.headrace.role=worker"]
    }


async def test_containers_of_others_are_not_described(proxy: Proxy) -> None:
    assert (await proxy.call("GET", f"/containers/{'1' * 64}/json")).json()["Name"] == "/headrace-worker-1"
    reply = await proxy.call("GET", "/containers/postgres/json")
    assert reply.status_code == 403
    assert "Env" not in reply.text
    assert (await proxy.call("GET", "/containers/nobody/json")).status_code == 404


@pytest.mark.parametrize(("method", "rest"), [("POST", "/start"), ("POST", "/stop?t=1"), ("DELETE", "?force=1")])
async def test_only_what_an_autoscaler_has_made_is_touched(proxy: Proxy, method: str, rest: str) -> None:
    for name in ("postgres", "headrace-worker-1"):
        assert (await proxy.call(method, f"/containers/{name}{rest}")).status_code == 403
    assert proxy.engine.changes == []
    assert (await proxy.call(method, f"/containers/headrace-worker-0b{rest}")).status_code == 204
    [change] = proxy.engine.changes
    assert change.path.split("/")[2] == MANAGED["Id"], "by the full id of what was looked at"
    assert change.body is None


async def test_a_clone_is_created_from_the_proxys_own_words(proxy: Proxy) -> None:
    body = clone_body(TEMPLATE, clone())
    reply = await proxy.call("POST", "/v1.41/containers/create?name=headrace-worker-0a", body)
    assert reply.status_code == 201, reply.text
    [change] = proxy.engine.changes
    assert (change.path, change.query) == ("/v1.41/containers/create", {"name": ["headrace-worker-0a"]})
    assert change.body == body


async def test_nothing_of_an_escape_reaches_the_engine(proxy: Proxy) -> None:
    body = clone_body(TEMPLATE, clone())
    body["HostConfig"]["Binds"] = ["/:/host"]
    reply = await proxy.call("POST", "/containers/create?name=headrace-worker-0a", body)
    assert (reply.status_code, proxy.engine.changes) == (403, [])
    assert "HostConfig.Binds[0]" in reply.json()["message"]


async def test_the_last_of_two_equal_keys_counts_and_the_first_goes_nowhere(proxy: Proxy) -> None:
    """What the engine's parser makes of them is of no concern: it gets another text."""
    text = json.dumps(clone_body(TEMPLATE, clone()))
    for sent in (
        f'{{"HostConfig":{{"Privileged":true}},{text[1:]}',
        f'{text[:-1]},"HostConfig":{{"Privileged":true}}}}',
    ):
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{proxy.port}/containers/create?name=headrace-worker-0a"
            await client.post(url, content=sent.encode())
    for change in proxy.engine.changes:
        assert "Privileged" not in change.body["HostConfig"]


async def test_a_generation_is_remembered_after_its_containers_are_gone(proxy: Proxy) -> None:
    url = "/containers/create?name=headrace-worker-0a"
    assert (await proxy.call("POST", url, clone_body(TEMPLATE, clone(generation=7)))).status_code == 201
    proxy.engine.containers.remove(MANAGED)
    assert (await proxy.call("POST", url, clone_body(TEMPLATE, clone(generation=6)))).status_code == 412


async def test_an_engine_that_is_away_is_a_503(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_proxy(engine, tmp_path) as port:
        (tmp_path / "engine.sock").unlink()
        reply = await Proxy(engine, port).call("GET", "/containers/json")
    assert reply.status_code == 503
    assert "no Docker engine" in reply.json()["message"]


async def test_an_endless_answer_of_the_engine_is_cut(proxy: Proxy) -> None:
    proxy.engine.answer = lambda call: (200, b"x" * (MAX_REPLY_BYTES + 1))
    reply = await proxy.call("GET", "/version")
    assert reply.status_code == 503
    assert "exceeds" in reply.text


async def test_the_engines_refusals_come_through(proxy: Proxy) -> None:
    proxy.engine.answer = lambda call: (500, {"message": "no space left on device"})
    assert (await proxy.call("GET", "/version")).json() == {"message": "no space left on device"}


BODY = b"Host: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /containers/json HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n", 403),
        (b"POST /containers/create HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n" + BODY + b"\r\n", 403),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 403),
        (b"GET http://docker/version HTTP/1.1\r\nHost: x\r\n\r\n", 403),
        (b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n" + BODY + b"\r\nabcde", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: -5\r\n" + BODY + b"\r\nabcde", 400),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n" + BODY + b"\r\nabcde", 501),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + BODY + b"\r\nxyz\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 99999999\r\n" + BODY + b"\r\n", 413),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
    ],
)
async def test_what_is_ambiguous_or_too_large_reaches_nobody(proxy: Proxy, head: bytes, status: int) -> None:
    answer = await proxy.raw(head)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert proxy.engine.received == []


async def test_a_body_in_chunks_is_counted(proxy: Proxy) -> None:
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    data = b"POST /containers/create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + BODY + b"\r\n"
    answer = await proxy.raw(data + chunk * (MAX_BODY_BYTES // 0x10000 + 1))
    assert answer == b"" or b" 413 " in answer.partition(b"\r\n")[0], "an answer may be lost to the reset"
    assert proxy.engine.received == []


async def test_a_second_request_on_a_connection_is_not_read(proxy: Proxy) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await proxy.raw(one + one)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert len(proxy.engine.received) == 1


@pytest.mark.parametrize(
    "sent", [b"", b"GET /version HTTP/1.1\r\nHost", b"POST /containers/create HTTP/1.1\r\nHost: x"]
)
async def test_who_dawdles_is_cut_off(proxy: Proxy, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 0.2)
    answer = await proxy.raw(sent)
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_connections_are_bounded(proxy: Proxy) -> None:
    async with contextlib.AsyncExitStack() as open_ones:
        for _ in range(MAX_CONNECTIONS):
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            open_ones.callback(writer.close)
        assert await proxy.raw(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n") == b""
    for _ in range(1200):  # until the closed ones have been noticed
        await asyncio.sleep(0.05)
        if await proxy.raw(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"):
            return
    pytest.fail("no connection is accepted any more")


@pytest.mark.parametrize("listing", [b"{", b"7", [{"Name": "no id"}], ["no object"], None])
async def test_a_listing_that_cannot_be_understood_creates_nothing(proxy: Proxy, listing: Any) -> None:
    whole = proxy.engine.answer
    proxy.engine.answer = lambda call: (200, listing) if call.path.endswith("/containers/json") else whole(call)
    url = "/v1.41/containers/create?name=headrace-worker-0a"
    reply = await proxy.call("POST", url, clone_body(TEMPLATE, clone()))
    assert reply.status_code == 503 and proxy.engine.changes == []
