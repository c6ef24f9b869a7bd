"""Which requests take the short way past FastAPI's routing."""

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from headrace_router.straight_calls import StraightCalls
from tests.byte_model import MODEL
from tests.router.support import running_router, says

STRAIGHT = ("/v1/chat/completions", "/v1/completions")


async def _receive() -> Any:
    raise AssertionError("nobody reads here")


async def _send(message: Any) -> None:
    raise AssertionError("nobody writes here")


@pytest.mark.parametrize(
    ("scope", "way"),
    [
        ({"type": "http", "method": "POST", "path": "/a"}, "straight"),
        ({"type": "http", "method": "GET", "path": "/a"}, "routed"),
        ({"type": "http", "method": "HEAD", "path": "/a"}, "routed"),
        ({"type": "http", "method": "POST", "path": "/a/"}, "routed"),
        ({"type": "http", "method": "POST", "path": "/b"}, "routed"),
        ({"type": "lifespan"}, "routed"),
    ],
)
async def test_only_a_post_to_just_this_path_goes_straight(scope: dict[str, Any], way: str) -> None:
    went: list[str] = []

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        went.append("routed")

    async def straight(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["route"].path == "/a"  # metrics and spans are labelled by it
        went.append("straight")

    await StraightCalls(routed, calls={"/a": lambda: straight})(scope, _receive, _send)
    assert went == [way]


async def test_what_goes_straight_is_described_counted_and_refused_like_everything_else() -> None:
    async with running_router(says("a")) as router:
        paths = (await router.client.get("/openapi.json")).json()["paths"]
        for path in STRAIGHT:
            assert set(paths[path]) == {"post"} and paths[path]["post"]["responses"]["200"]
            assert (await router.client.get(path)).status_code == 405
            assert (await router.client.post(path + "/", json={})).status_code == 404
            refused = await router.client.post(path, json={"model": "other", "prompt": "a", "messages": []})
            assert refused.status_code in (400, 404) and refused.json()["error"]["code"]
            assert refused.headers["x-request-id"] and "openai-processing-ms" in refused.headers
        answered = await router.client.post(STRAIGHT[1], json={"model": MODEL, "prompt": "a"})
        assert answered.status_code == 200
        metrics = (await router.client.get("/metrics")).text
        counted = [line for line in metrics.splitlines() if "http_server" in line and "_count" in line]
        for path in STRAIGHT:
            assert any(f'"{path}"' in line and '"405"' not in line for line in counted), counted
