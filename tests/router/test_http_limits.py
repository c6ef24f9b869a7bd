"""HTTP is read strictly and within bounds: what is malformed, ambiguous, too large or too slow ends with a 4xx and a
closed connection, before anything is kept."""

import asyncio
import contextlib
import http.client
import json
import random
import resource
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.connection_counts import ConnectionCounts
from headrace_router.request_head import MAX_HEAD_BYTES, MAX_HEADERS, Head, refusal_of
from headrace_router.settings import RouterSettings
from headrace_router.web_server import room_for_connections
from tests.byte_model import MODEL
from tests.router.raw_http import CHUNKED, GET, MALFORMED, POST, exchange, raw_connection
from tests.router.support import Router, running_router, says


def settings(**changes: Any) -> RouterSettings:
    return RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    async with running_router(says("ok"), settings=settings(max_body_bytes=100_000)) as running:
        yield running


async def refused(router: Router, data: bytes, status: int) -> None:
    answer = await asyncio.to_thread(exchange, router.port, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), (data[:80], answer[:200])
    assert answer.count(b"HTTP/1.1 ") == 1, "what follows on the connection is not served"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


SMUGGLED = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_malformed_or_ambiguous_is_refused_and_the_connection_closed(router: Router, name: str) -> None:
    await refused(router, MALFORMED[name] + SMUGGLED, 400)
    assert router.worker.requests == []
    assert 'code="invalid_http"' in (await router.client.get("/metrics")).text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("is_streamed", "end"), [(True, b"data: [DONE]\n\n"), (False, b"}")])
async def test_old_clients_are_sent_no_chunks(router: Router, is_streamed: bool, end: bytes) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "stream": is_streamed}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await asyncio.to_thread(exchange, router.port, head + body)
    head, _, told = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head.lower()
    assert (b"content-length" in head.lower()) is not is_streamed and b"connection: close" in head.lower()
    assert told.startswith(b"data: {" if is_streamed else b"{") and told.endswith(end) and b'"text":"' in told


@pytest.mark.asyncio(loop_scope="module")
async def test_heads_that_are_too_large(router: Router) -> None:
    await refused(router, GET + b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n", 431)
    await refused(router, GET + b"x: " + b"y" * (MAX_HEAD_BYTES + 100), 431)
    await refused(router, GET + b"".join(b"h%d: x\r\n" % i for i in range(MAX_HEADERS)) + b"\r\n", 431)
    await refused(router, b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414)
    await refused(router, b"GET /" + b"x" * 100_000, 414)
    await refused(router, b"GET /live HTTP/2.0\r\nHost: x\r\n\r\n", 505)
    await refused(router, b"GET /live\r\n\r\n", 505)
    fitting = GET + b"x: " + b"y" * 15_000 + b"\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(90))
    answer = await asyncio.to_thread(exchange, router.port, fitting + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.asyncio(loop_scope="module")
async def test_bodies_that_are_too_large_however_they_come(router: Router) -> None:
    declared = POST + b"Connection: close\r\nContent-Length: 50000000\r\n\r\n"
    large = b"%x\r\n" % 200_000 + b"{" * 200_000 + b"\r\n0\r\n\r\n"
    for data in (declared, CHUNKED + b"Connection: close\r\n\r\n" + large):
        answer = await asyncio.to_thread(exchange, router.port, data)
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:100]
    compressed = POST + b"Connection: close\r\nContent-Encoding: %b\r\nContent-Length: 2\r\n\r\n{}"
    for coding in (b"gzip", b"br", b"deflate", b"zstd", b"gzip, identity"):
        answer = await asyncio.to_thread(exchange, router.port, compressed % coding)
        assert answer.startswith(b"HTTP/1.1 415 "), coding
    # Neither a length nor chunks: there is no body, so that what follows is another request.
    answer = await asyncio.to_thread(exchange, router.port, POST + b'Connection: close\r\n\r\n{"model": "x"}')
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.asyncio(loop_scope="module")
async def test_floods_of_tiny_chunks_are_cut(router: Router) -> None:
    answer = await asyncio.to_thread(exchange, router.port, CHUNKED + b"\r\n" + b"1\r\n \r\n" * 3_000)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"small chunks" in answer
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = await asyncio.to_thread(exchange, router.port, CHUNKED + b"Connection: close\r\n\r\n" + pieces)
    assert answer.startswith(b"HTTP/1.1 200 "), "a small body may come in any pieces"
    router.worker.requests.clear()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_offer_of_another_protocol_is_ignored_and_the_body_read(router: Router) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}

    def twice() -> list[int]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)) as connection:
            statuses = []
            for _ in range(2):
                connection.request("POST", "/v1/completions", body, offer)
                with connection.getresponse() as answer:
                    statuses.append(answer.status)
                    answer.read()
            return statuses

    assert await asyncio.to_thread(twice) == [200, 200]
    router.worker.requests.clear()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/live", "/health", "/nothing", "/v1/models", "/v1/chat/completions"])
async def test_an_answer_to_head_has_no_body(router: Router, path: str) -> None:
    data = f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    answer = await asyncio.to_thread(exchange, router.port, data)
    assert answer.startswith(b"HTTP/1.1 ") and answer.endswith(b"\r\n\r\n") and answer.count(b"\r\n\r\n") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_noise_is_survived(router: Router) -> None:
    chance = random.Random(7)
    words = [
        POST,
        CHUNKED,
        GET,
        b"\r\n",
        b"\r\n\r\n",
        b"0",
        b"5\r\n",
        b"{}",
        b"\0",
        b"\xff" * 9,
        b"Host: y",
        b": ",
        b";",
    ]
    for _ in range(60):
        data = b"".join(chance.choice(words) for _ in range(chance.randrange(1, 12))) + b"\r\n\r\n\r\n\r\nEND\r\n\r\n"
        with raw_connection(router.port) as connection, contextlib.suppress(OSError):
            connection.setblocking(True)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0)
    assert (await router.client.get("/live")).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_no_error_tells_about_the_inside(router: Router) -> None:
    leaks = (b"/usr", b"/work", b"/tmp", b".py", b"Traceback", b"headrace_", b"requests.", b"tokens.", b"nats", b"0x7f")
    path = "/v1/chat/completions"
    for body in (b"", b"{", b"[" * 10_000, b'{"a":' * 5000, b'"' + b"\\" * 999, b"\xff\xfe", b"1e999999", b"nul"):
        reply = await router.client.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400
        assert not [leak for leak in leaks if leak in reply.content], reply.text
    for method, where in (
        ("GET", "/v1/requests/../../etc"),
        ("DELETE", path),
        ("PATCH", "/"),
        ("GET", "/v1/models/%00"),
    ):
        reply = await router.client.request(method, where)
        assert 400 <= reply.status_code < 500
        assert not [leak for leak in leaks if leak in reply.content.replace(where.encode(), b"")], reply.text


async def test_slow_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and bodies that trickle, bodies that nobody wants, and blank lines that keep a connection for nothing."""
    monkeypatch.setattr("headrace_router.http_protocol.HEAD_TIMEOUT_S", 0.4)
    monkeypatch.setattr("headrace_router.http_protocol.LINGER_S", 0.4)
    monkeypatch.setattr("headrace_router.bodies.GRACE_S", 0.4)

    def trickle(port: int, start: bytes, drop: bytes) -> tuple[bytes, float]:
        began_at, answer = time.monotonic(), b""
        with raw_connection(port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(start)
            connection.settimeout(0.05)
            while time.monotonic() - began_at < 60.0:
                with contextlib.suppress(TimeoutError):
                    part = connection.recv(65536)
                    answer += part
                    if not part:
                        break
                connection.sendall(drop)
        return answer, time.monotonic() - began_at

    length = b"Content-Length: 90000\r\n\r\n"
    cases = [
        (GET, b"x: y\r\n", b""),
        (POST + length, b" ", b"HTTP/1.1 408 "),
        (CHUNKED + b"\r\n", b"1\r\n \r\n", b"HTTP/1.1 408 "),
        (b"GET /live HTTP/1.1\r\nHost: x\r\n" + length, b" ", b"HTTP/1.1 200 "),
        (GET + b"\r\n", b"\r\n", b"HTTP/1.1 200 "),
    ]
    async with running_router(says("ok"), settings=settings()) as router:
        jobs = [asyncio.to_thread(trickle, router.port, start, drop) for start, drop, _ in cases]
        results = await asyncio.gather(*jobs)
        for (start, _, expected), (answer, took_s) in zip(cases, results, strict=True):
            assert answer.startswith(expected), (start, answer)
            assert took_s < 50.0, start


async def test_bodies_that_are_coming_are_bounded_together() -> None:
    """Each is within its limit; what is taken comes back with the clients' end."""

    def begin(port: int, num_bytes: int) -> socket.socket:
        connection = raw_connection(port)
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % 5000 + b" " * num_bytes)
        return connection

    def crowd(port: int) -> bytes:
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                stack.enter_context(begin(port, 4990))
            time.sleep(0.3)
            with begin(port, 4990) as late:
                return late.recv(65536)

    async with running_router(says("ok"), settings=settings(max_body_bytes=5000)) as router:
        answer = await asyncio.to_thread(crowd, router.port)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after" in answer.lower()
        await asyncio.sleep(0.2)
        assert (await router.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code == 200


async def test_connections_are_counted_and_come_back() -> None:
    async with running_router(says("ok"), settings=settings(max_connections_per_address=8)) as router:
        await router.client.aclose()
        await asyncio.sleep(0.2)  # until its end is known here

        def crowd() -> tuple[bytes, bytes]:
            with contextlib.ExitStack() as stack:
                held = [stack.enter_context(raw_connection(router.port)) for _ in range(8)]
                held[-1].sendall(GET + b"\r\n")
                assert held[-1].recv(100).startswith(b"HTTP/1.1 200 ")
                refusal = exchange(router.port)
            for _ in range(1200):
                answer = exchange(router.port, GET + b"Connection: close\r\n\r\n")
                if answer.startswith(b"HTTP/1.1 200 "):
                    break
                time.sleep(0.05)
            return refusal, answer

        refusal, answer = await asyncio.to_thread(crowd)
        assert refusal.startswith(b"HTTP/1.1 503 ") and answer.startswith(b"HTTP/1.1 200 ")


@given(st.lists(st.tuples(st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"]), st.booleans())))
def test_counts_never_exceed_their_bounds(steps: list[tuple[str, bool]]) -> None:
    counts = ConnectionCounts(5, 3)
    inside: list[str] = []
    for address, enters in steps:
        if enters and counts.enter(address):
            inside.append(address)
        elif not enters and address in inside:
            inside.remove(address)
            counts.leave(address)
        assert len(inside) <= 5
        assert sum(":" in one for one in inside) <= 3, "neighbours in a /64 are one"
        assert counts.num_origins == len({":" if ":" in one else one for one in inside})


@pytest.mark.parametrize(
    ("soft", "hard", "room", "raised_to"),
    [
        (1024, 1024, 896, 1024),
        (1024, 4096, 3968, 4096),
        (1024, -1, 20_000, 20_128),
        (-1, -1, 20_000, -1),
        (64, 64, 1, 64),
    ],
)
def test_there_are_no_more_connections_than_descriptors(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, room: int, raised_to: int
) -> None:
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert room_for_connections(20_000) == room
    assert limits[resource.RLIMIT_NOFILE][0] == raised_to


def test_mapped_addresses_are_the_ones_that_they_mean() -> None:
    counts = ConnectionCounts(9, 1)
    assert counts.enter("::ffff:10.0.0.1") and not counts.enter("10.0.0.1") and counts.enter("10.0.0.2")


@given(st.binary(max_size=30), st.lists(st.tuples(st.sampled_from([b"host", b"x"]), st.binary(max_size=9)), max_size=4))
def test_any_head_is_judged(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    refusal = refusal_of(Head("1.1", target, headers, is_upgrade=False))
    if refusal is None:
        assert target.startswith(b"/") and sum(name == b"host" for name, _ in headers) == 1
