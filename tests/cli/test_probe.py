"""What a start takes for an answer."""

import httpx
import pytest

from headrace_cli.probe import generate


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (200, {"usage": {"completion_tokens": 1}}, None),
        (401, {"error": {"message": "An API key is required."}}, None),
        (200, {"usage": {"completion_tokens": 0}}, "HTTP 200"),
        (403, {"error": {}}, "HTTP 403"),
        (500, {"error": {}}, "HTTP 500"),
        (503, {"error": {"code": "wait_too_long"}}, None),
        (429, {"error": {"code": "queue_full"}}, None),
        (503, {"error": {"code": "unavailable"}}, "HTTP 503"),
        (503, {"error": {"code": "no_worker"}}, "HTTP 503"),
    ],
)
async def test_a_router_that_wants_keys_or_is_busy_is_ready_and_one_that_fails_is_not(
    status: int, body: dict[str, object], problem: str | None
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
    async with httpx.AsyncClient(transport=transport) as client:
        told = await generate(client, "http://router", "m")
    assert told is None if problem is None else told is not None and told.startswith(problem)
