"""A client's id of a request is a name for the client's own use: it opens nothing of anybody else's."""

from urllib.parse import quote

import pytest

from tests.router.keys import add_key, strict_router, until_known
from tests.router.resumable import CHAT, HELD_ID, body
from tests.router.scripts import endless
from tests.router.support import running_router, says

HOSTILE = ["*", ">", "a.b", "tokens.>", "..", ".", "a\r\nPUB x 0", "a\x00b", "x" * 10_000, "%2e%2e", "$KV.KEYS.>", "ů"]


async def test_the_same_id_of_two_tenants_means_two_requests() -> None:
    async with strict_router(endless) as router:
        a = await add_key(router.bus, name="a", tenant="a") | {"x-request-id": "order-7"}
        b = await add_key(router.bus, name="b", tenant="b", flow=2) | {"x-request-id": "order-7"}
        for headers in (a, b):
            await until_known(router, headers)
        held = {"Headrace-Resumable": "true"}
        async with (
            router.client.stream("POST", CHAT, json=body(CHAT), headers=a | held) as first,
            router.client.stream("POST", CHAT, json=body(CHAT), headers=b | held) as second,
        ):
            ids = [stream.headers[HELD_ID] for stream in (first, second)]
            assert ids[0] != ids[1] and all(len(each) == 32 and int(each, 16) >= 0 for each in ids)
            for headers, own, other in ((a, ids[0], ids[1]), (b, ids[1], ids[0])):
                named = await router.client.get("/v1/requests/order-7?wait=false", headers=headers)
                assert own in named.text and other not in named.text
                assert (await router.client.get(f"/v1/requests/{other}?wait=false", headers=headers)).status_code == 404
            ended = await router.client.post(f"/v1/requests/{ids[1]}/cancel", headers=b)
            assert ended.status_code == 200
            assert {cancel.request_id for cancel in router.worker.cancels} <= {ids[1]}


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:12]))
async def test_no_id_reaches_into_subjects_or_paths(name: str) -> None:
    async with running_router(says("ok")) as router:
        for method, path in (("GET", "/v1/requests/{}"), ("POST", "/v1/requests/{}/cancel")):
            reply = await router.client.request(method, path.format(quote(name, safe="")))
            assert reply.status_code in (400, 404, 405, 414), reply.text
            assert "tokens." not in reply.text.replace(name, "") and "Traceback" not in reply.text
