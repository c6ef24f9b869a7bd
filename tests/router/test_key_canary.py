"""An API key is compared in constant time, kept as a hash, and found nowhere but with its owner; every route asks for
one, whatever its path is written like."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from headrace_router import app, service
from headrace_router.authentication import OPEN_PATHS, PAGE_FILES, PAGE_PATHS
from headrace_router.key_table import KeyTable
from headrace_shared.api_keys import ApiKey, new_key
from headrace_shared.codec import encode
from headrace_shared.errors import Unauthorized
from headrace_shared.subjects import KEYS
from tests.byte_model import MODEL
from tests.router.keys import add_key, strict_settings, until_known
from tests.router.raw_http import exchange
from tests.router.support import Router, running_router, says


@contextlib.asynccontextmanager
async def strict(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Router, FastAPI]]:
    """A router that requires keys, and its application."""
    made: list[FastAPI] = []
    make_app = app.make_app

    def remember(*arguments: Any) -> FastAPI:
        made.append(make_app(*arguments))
        return made[-1]

    monkeypatch.setattr(service, "make_app", remember)
    async with running_router(says("ok"), settings=strict_settings()) as router:
        yield router, made[0]


def paths_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    """Of all routes, those of routers that are included, too."""
    for route in routes:
        if isinstance(route, Route):
            yield route.path
        else:
            yield from paths_of(route.original_router.routes)  # type: ignore[attr-defined]  # fails for whatever is new


def test_secrets_are_compared_as_hashes_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def recorded(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return compare(first, second)

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    table, made, other = KeyTable(are_required=True), new_key(), new_key()
    record = ApiKey(key_id=made.key_id, secret_hash=made.secret_hash, name="n", tenant="t", flow=1, created=0)
    entry = _Entry(encode(record))
    table.on_change(entry, made.key_id)  # type: ignore[arg-type]  # only its value is read
    assert table.identify(f"Bearer {made.text}").key is not None
    for wrong in (other.text, f"hr-{made.key_id}-{other.text[-43:]}"):
        with pytest.raises(Unauthorized):
            table.identify(f"Bearer {wrong}")
    assert len(compared) == 3, "also where there is no such key"
    assert all(len(first) == len(second) == 32 for first, second in compared)
    assert made.text[-43:].encode() not in entry.value


def test_a_key_that_was_overwritten_by_something_else_stays_until_it_is_revoked() -> None:
    table, made = KeyTable(are_required=True), new_key()
    record = ApiKey(key_id=made.key_id, secret_hash=made.secret_hash, name="n", tenant="t", flow=1, created=0)
    for value in (encode(record), b'{"stream":"KV_MODELS","seq":1}', b""):
        table.on_change(_Entry(value), made.key_id)  # type: ignore[arg-type]  # only its value is read
        assert table.identify(f"Bearer {made.text}").key is not None
    table.on_change(None, made.key_id)
    table.on_change(_Entry(b"{}"), made.key_id)  # type: ignore[arg-type]  # only its value is read
    with pytest.raises(Unauthorized):
        table.identify(f"Bearer {made.text}")


class _Entry:
    def __init__(self, value: bytes) -> None:
        self.value = value


async def test_every_route_asks_for_a_key_however_its_path_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with strict(monkeypatch) as (router, application):
        paths = list(paths_of(application.routes))
        assert len(paths) > 15 and "/v1/chat/completions" in paths and "/openapi.json" in paths
        opened = {"/health", "/live", "/", "/dashboard"}
        assert opened == OPEN_PATHS | PAGE_PATHS
        closed = [path for path in paths if path not in opened and not path.startswith(PAGE_FILES)]
        assert len(closed) > 10
        for path in closed:
            plain = path.replace("{request_id}", "x").replace("{name:path}", "x").replace("{", "").replace("}", "")
            written = [plain, plain + "/", plain + ".", "/" + plain, plain.upper(), f"/%{ord(plain[1]):02x}{plain[2:]}"]
            written += ["/." + plain, "/health/.." + plain, "/health/%2e%2e" + plain, "/live;" + plain, plain + "%00"]
            written += ["/dashboard/static/.." + plain, "/dashboard/static/%2e%2e" + plain, plain + "?x=/health"]
            for each in written:
                await _is_refused(router, "GET", each)
            for method in ("POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"):
                await _is_refused(router, method, plain)
        assert router.worker.requests == []


async def test_open_paths_are_open_in_one_spelling_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with strict(monkeypatch) as (router, _):
        for path in ("/health", "/live", "/live?x=1", "/dashboard", "/dashboard/static/boot.js"):
            assert (await router.client.get(path)).status_code in (200, 503), path
        for path in ("/%68ealth", "/health%2f", "//health", "/health.", "/Health", "/dashboard/static/%2e%2e/api/live"):
            await _is_refused(router, "GET", path)
        old = await _raw(router, b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert old.startswith(b"HTTP/1.1 401 ")


async def test_no_answer_and_no_record_holds_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, pages, errors, the broker. Logs and processes: tests/e2e/test_secrets.py."""
    async with strict(monkeypatch) as (router, application):
        headers = await add_key(router.bus)
        await until_known(router, headers)
        key = headers["Authorization"].removeprefix("Bearer ")
        secret = key[-43:]
        body = {"model": MODEL, "prompt": "a"}
        shown: list[httpx.Response] = []
        wrong = [{"Authorization": f"Bearer {key}x"}, {"Authorization": f"Basic {key}"}]
        for given in (headers, {"x-api-key": key}, *wrong):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
                shown.append(await router.client.post(path, json=body, headers=given))
                shown.append(await router.client.post(path, content=b"{", headers=given))
        for path in paths_of(application.routes):
            if "live" not in path.rpartition("/")[2]:  # the dashboard's never ends
                shown.append(await router.client.get(path, headers=headers))
        assert {reply.status_code for reply in shown} >= {200, 400, 401, 404, 405}
        for reply in shown:
            assert secret not in reply.text and secret not in str(reply.headers), reply.url
        for entry in await router.bus.entries(KEYS.name):
            assert secret.encode() not in entry.value


async def _is_refused(router: Router, method: str, path: str) -> None:
    answer = await _raw(router, f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 401 "), (method, path, answer[:200])


async def _raw(router: Router, data: bytes) -> bytes:
    return await asyncio.to_thread(exchange, router.port, data)
