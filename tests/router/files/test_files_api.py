"""/v1/files over HTTP: what is stored comes back, within bounds, and to its owner only."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from headrace_router.files import routes, uploading
from headrace_router.files.library import FileLibrary, FileLimits
from headrace_router.files.record import FileRecord, Quota
from headrace_router.files.transfers import Transfers
from headrace_router.owners import owner_token
from headrace_router.settings import RouterSettings
from headrace_shared.bus import Bus
from headrace_shared.codec import decode
from headrace_shared.errors import Overloaded
from headrace_shared.memory_bus import MemoryBus
from headrace_shared.subjects import FILE_CONTENT, FILES
from tests.router.keys import add_key, until_known
from tests.router.support import Router, running_router, says

FILE_BYTES = 1024 * 1024
LIMITS = {"max_file_bytes": FILE_BYTES, "file_quota_bytes": 2 * FILE_BYTES, "file_quota_count": 4}


@contextlib.asynccontextmanager
async def router_of(**settings: Any) -> AsyncIterator[Router]:
    given = RouterSettings(port=0, drain_delay_s=0.0, drain_timeout_s=5.0, **{**LIMITS, **settings})
    async with running_router(says("x"), settings=given, has_worker=False) as router:
        yield router


async def upload(
    router: Router,
    content: bytes = b'{"a": 1}\n',
    name: str = "in.jsonl",
    purpose: str = "batch",
    headers: dict[str, str] | None = None,
    fields: dict[str, str] | None = None,
) -> httpx.Response:
    data = {"purpose": purpose, **(fields or {})}
    return await router.client.post("/v1/files", data=data, files={"file": (name, content)}, headers=headers)


async def num_stored(bus: Bus) -> tuple[int, int]:
    """(descriptions, pieces and their descriptions)"""
    return len(await bus.entries(FILES.name)), await bus.num_messages(FILE_CONTENT.name)


def error_of(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


async def test_a_file_comes_back_as_it_was() -> None:
    async with router_of() as router:
        content = os.urandom(700_000)
        reply = await upload(router, content, "../dir/übung 1.jsonl")
        file = reply.json()
        assert reply.status_code == 200 and file == file | {
            "object": "file",
            "bytes": 700_000,
            "filename": "übung 1.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        assert file["expires_at"] - file["created_at"] == 30 * 86_400
        assert (await router.client.get(f"/v1/files/{file['id']}")).json() == file
        got = await router.client.get(f"/v1/files/{file['id']}/content")
        assert got.content == content and got.headers["content-length"] == "700000"
        assert got.headers["x-content-type-options"] == "nosniff"
        assert "%C3%BCbung%201.jsonl" in got.headers["content-disposition"]
        assert (await router.client.delete(f"/v1/files/{file['id']}")).json() == {
            "id": file["id"],
            "object": "file",
            "deleted": True,
        }
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
            assert error_of(await router.client.get(path)) == (404, "file_not_found", "file_id")
        assert error_of(await router.client.delete(f"/v1/files/{file['id']}"))[0] == 404
        assert await num_stored(router.bus) == (0, 0)


async def test_an_empty_file_and_fields_behind_it_are_in_order() -> None:
    async with router_of() as router:
        form = (
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="e"\r\n\r\n\r\n'
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
        )
        headers = {"content-type": "multipart/form-data; boundary=b"}
        reply = await router.client.post("/v1/files", content=form, headers=headers)
        assert reply.status_code == 200 and reply.json()["bytes"] == 0
        assert (await router.client.get(f"/v1/files/{reply.json()['id']}/content")).content == b""


async def test_lists_have_pages() -> None:
    async with router_of() as router:
        ids = [(await upload(router, name=f"{n}")).json()["id"] for n in range(4)]
        first = (await router.client.get("/v1/files", params={"limit": 3})).json()
        assert first["object"] == "list" and first["has_more"] and len(first["data"]) == 3
        rest = (await router.client.get("/v1/files", params={"limit": 3, "after": first["last_id"]})).json()
        assert not rest["has_more"] and {file["id"] for file in first["data"] + rest["data"]} == set(ids)
        assert (await router.client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        assert error_of(await router.client.get("/v1/files", params={"limit": "0"})) == (400, "invalid_value", "limit")
        assert error_of(await router.client.get("/v1/files", params={"after": "file-1"}))[2] == "after"


async def test_what_is_wrong_is_named_and_leaves_nothing() -> None:
    async with router_of() as router:
        assert error_of(await upload(router, purpose="assistants")) == (400, "invalid_value", "purpose")
        assert error_of(await router.client.post("/v1/files", json={})) == (415, "unsupported_media_type", None)
        no_file = await router.client.post("/v1/files", files={"purpose": (None, "batch")})
        assert error_of(no_file) == (400, "missing_required_parameter", "file")
        no_purpose = await router.client.post("/v1/files", files={"file": ("a", b"x")})
        assert error_of(no_purpose) == (400, "missing_required_parameter", "purpose")
        a, b, purpose = ("file", ("a", b"x")), ("file", ("b", b"y")), ("purpose", (None, b"batch"))
        assert error_of(await router.client.post("/v1/files", files=[a, b, purpose])) == (400, "invalid_value", "file")
        long = await upload(router, fields={"metadata": "x" * 2000})
        assert error_of(long) == (400, "invalid_value", "metadata")
        life = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
        assert error_of(await upload(router, fields=life))[2] == "expires_after[seconds]"
        headers = {"content-type": "multipart/form-data; boundary=b"}
        cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="e"\r\n\r\nxyz'
        assert error_of(await router.client.post("/v1/files", content=cut, headers=headers))[1] == "invalid_multipart"
        assert await num_stored(router.bus) == (0, 0)


async def test_limits_of_size_hold_with_and_without_a_declared_length() -> None:
    async with router_of() as router:
        assert (await upload(router, bytes(FILE_BYTES))).status_code == 200
        assert error_of(await upload(router, bytes(FILE_BYTES + 1))) == (413, "payload_too_large", "file")
        assert error_of(await upload(router, bytes(3 * FILE_BYTES))) == (413, "payload_too_large", "file")

        async def endless() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="e"\r\n\r\n'
            for _ in range(40):
                yield bytes(100_000)

        headers = {"content-type": "multipart/form-data; boundary=b"}
        reply = await router.client.post("/v1/files", content=endless(), headers=headers)
        assert error_of(reply) == (413, "payload_too_large", "file")
        assert len(await router.bus.entries(FILES.name)) == 1


async def test_quotas_of_bytes_and_files() -> None:
    async with router_of() as router:
        big = [(await upload(router, bytes(FILE_BYTES - 100_000))).json()["id"] for _ in range(2)]
        assert error_of(await upload(router, bytes(FILE_BYTES // 2)))[0] in (403, 413)
        assert (await upload(router, bytes(100_000))).status_code == 200
        assert (await upload(router)).status_code == 200
        assert error_of(await upload(router)) == (403, "file_quota_exceeded", "file")
        await router.client.delete(f"/v1/files/{big[0]}")
        assert (await upload(router, bytes(FILE_BYTES // 2))).status_code == 200


async def test_uploads_at_the_same_time_share_the_quota() -> None:
    async with router_of(file_quota_count=100) as router:
        replies = await asyncio.gather(*(upload(router, bytes(FILE_BYTES // 2)) for _ in range(8)))
        assert {reply.status_code for reply in replies} <= {200, 403, 413}
        listed = (await router.client.get("/v1/files")).json()["data"]
        assert len(listed) == sum(reply.status_code == 200 for reply in replies) <= 4
        entries = await router.bus.entries(FILES.name)
        assert len(entries) == len(listed)


async def test_a_tenant_sees_only_its_own() -> None:
    async with router_of(require_keys=True) as router:
        keys = [await add_key(router.bus, tenant=name) for name in ("a", "a", "b")]
        for key in keys:
            await until_known(router, key)
        file_id = (await upload(router, headers=keys[0])).json()["id"]
        path = f"/v1/files/{file_id}"
        assert (await router.client.get(path, headers=keys[1])).status_code == 200
        for method, url in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
            assert error_of(await router.client.request(method, url, headers=keys[2]))[0] == 404
            assert (await router.client.request(method, url)).status_code == 401
        assert (await router.client.get("/v1/files", headers=keys[2])).json()["data"] == []
        assert (await router.client.post("/v1/files", content=b"x")).status_code == 401
        assert (await router.client.get(path, headers=keys[0])).status_code == 200


async def test_names_that_are_no_ids_are_not_found() -> None:
    async with router_of() as router:
        for name in ("x", "file-1", "file-" + "g" * 32, "*", "file-*", "%3E", "file-" + "0" * 32 + ".x"):
            assert (await router.client.get(f"/v1/files/{name}")).status_code == 404


async def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async with router_of() as router:
        with socket.create_connection(("127.0.0.1", router.port)) as connection:
            head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="e"\r\n\r\n'
            request = (
                b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
                b"content-length: 900000\r\n\r\n" + head + bytes(300_000)
            )
            await asyncio.to_thread(connection.sendall, request)
            async with asyncio.timeout(5.0):
                while (await num_stored(router.bus))[1] < 2:  # noqa: ASYNC110 - the broker's state
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(5.0):
            while await num_stored(router.bus) != (0, 0):  # noqa: ASYNC110 - the broker's state
                await asyncio.sleep(0.01)


async def test_a_file_that_comes_too_slowly_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never stops for long."""
    monkeypatch.setattr(uploading, "GRACE_S", 0.3)
    async with router_of() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        writer.write(f"{head}Content-Length: 100000\r\n\r\n".encode())
        async with asyncio.timeout(20.0):
            answer = asyncio.create_task(reader.readline())
            while not answer.done():
                with contextlib.suppress(OSError):
                    writer.write(b"-")
                    await writer.drain()
                await asyncio.sleep(0.05)
        assert b" 408 " in await answer or b" 400 " in await answer
        writer.close()


async def test_who_has_no_key_is_counted_by_address() -> None:
    """Names that clients give themselves are no others."""
    async with router_of() as router:
        seen: list[str] = []
        one = Transfers.one

        def watched(self: Transfers, caller: str) -> contextlib.AbstractContextManager[None]:
            seen.append(caller)
            return one(self, caller)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transfers, "one", watched)
            for name in ("x", "y"):
                assert (await upload(router, headers={"authorization": f"Bearer {name}"})).status_code == 200
        assert seen == ["127.0.0.1", "127.0.0.1"]


def test_files_on_their_way_are_counted() -> None:
    transfers = Transfers(3, 2)
    with transfers.one("a"), transfers.one("a"):
        with pytest.raises(Overloaded), transfers.one("a"):
            pass
        with transfers.one("b"), pytest.raises(Overloaded), transfers.one("c"):
            pass
    with transfers.one("a"):
        assert len(transfers._running) == 1
    assert not transfers._running


async def test_a_download_that_nobody_takes_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SEND_TIMEOUT_S", 0.05)
    transfers = Transfers(1, 1)
    sent: list[Message] = []

    async def content() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    for version in ("2.3", "2.4"):
        sent.clear()
        async with asyncio.timeout(10.0):
            scope = {"type": "http", "asgi": {"spec_version": version}}
            await routes._Download(transfers.one("a"), content(), {})(scope, receive, send)
        assert len(sent) == 4 and sent[-1].get("more_body")
    with transfers.one("a"):
        pass


class Library:
    """Without a router, at any time."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.now = 1000.0
        limits = FileLimits(Quota(10, FILE_BYTES), FILE_BYTES, upload_timeout_s=60.0)
        self.files = FileLibrary(self.bus, limits, lambda: self.now)

    async def store(self, life_s: int = 3600) -> FileRecord:
        draft = await self.files.begin("owner", "name", 0, 10)
        await draft.write(b"content")
        return await self.files.finish(draft, "batch", life_s)


async def test_expired_files_are_gone_at_once_and_deleted_soon() -> None:
    library = Library()
    await library.files.open()
    short, long = await library.store(), await library.store(7200)
    assert await library.files.sweep(()) == 0
    library.now += 3600
    assert [file.file_id for file in await library.files.all_of("owner")] == [long.file_id]
    assert await library.files.sweep({short.file_id}) == 0
    assert await library.files.sweep(()) == 1
    assert await num_stored(library.bus) == (1, 2)
    library.now += 3600
    assert await library.files.sweep(()) == 1
    assert await num_stored(library.bus) == (0, 0)


async def test_what_a_dead_router_left_is_deleted_in_time() -> None:
    library = Library()
    await library.files.open()
    draft = await library.files.begin("owner", "name", 0, 400_000)
    await draft.write(bytes(300_000))
    kept = await library.store()
    entry = await library.bus.get(FILES.name, f"owner.{kept.file_id}")
    assert entry is not None and decode(entry.value, FileRecord) == kept
    assert await library.files.all_of("owner") == [kept]
    assert await library.files.sweep(()) == 0
    library.now += 121
    assert await library.files.sweep(()) == 1
    assert await num_stored(library.bus) == (1, 2)


async def test_a_file_can_be_kept_whose_answer_was_lost() -> None:
    library = Library()
    await library.files.open()
    draft = await library.files.begin("owner", "name", 0, 10)
    await draft.write(b"content")
    once = await library.files.finish(draft, "batch", 3600)
    assert await library.files.finish(draft, "batch", 3600) == once
    stored = await library.files.stored("owner", once.file_id)
    assert b"".join([piece async for piece in library.files.content(stored)]) == b"content"


@pytest.mark.parametrize("owner", ["", "tenant:x", "a.b", ">"])
def test_owners_are_safe_in_keys(owner: str) -> None:
    token = owner_token(owner)
    assert token.isalnum() and len(token) == 32 and json.dumps(token).isascii()


async def test_a_damaged_file_does_not_end_well() -> None:
    async with router_of() as router:
        file = (await upload(router, os.urandom(500_000))).json()
        messages = await router.bus.read(FILE_CONTENT.name, f"$O.FILES.C.{file['id']}", 10)
        await router.bus.delete(FILE_CONTENT.name, messages[1].stream_sequence)
        with pytest.raises(httpx.RemoteProtocolError):
            await router.client.get(f"/v1/files/{file['id']}/content")
