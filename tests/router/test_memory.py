"""A router's memory under the largest bodies there are, as a process of its own."""

from pathlib import Path

import httpx
import pytest
import yaml

from headrace_shared.broker import NatsServer
from tests.router.large_bodies import KINDS, measured_router

pytestmark = pytest.mark.nats

COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"
UNITS = {"m": 1 << 20, "g": 1 << 30}
TRIED = (
    *("a chat that is cut", "a chat that is too long", "a chat with one wide letter", "a chat of escapes"),
    *("a text that is cut", "one word that is cut", "many texts", "inputs", "inputs of token ids"),
    *("a response", "a message", "a text to tokenize", "a field of no meaning"),
)
ROOM = 0.8
"""Of its container's memory a router uses at most."""


def container_bytes() -> int:
    limit = str(yaml.safe_load(COMPOSE.read_text())["services"]["router"]["mem_limit"])
    return int(limit[:-1]) * UNITS[limit[-1]]


async def test_the_largest_bodies_of_all_endpoints_at_once_fit_into_a_router_s_container(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    bodies = {kind: (path, make()) for kind, (path, make) in KINDS.items() if kind in TRIED}
    async with (
        measured_router(nats_server, tmp_path) as router,
        httpx.AsyncClient(timeout=120.0, trust_env=False) as client,
    ):
        before = router.sizes().now
        told = await router.give(client, bodies)
        reply = await client.post(router.url + "/v1/completions", json={"model": "tiny", "prompt": "Hi"})
        sizes = router.sizes()
    assert reply.status_code == 200, "it goes on"
    assert set(told.values()) <= {200, 400, 413, 503}, told
    assert sizes.peak < ROOM * container_bytes(), sizes
    assert sizes.now < (before + sizes.peak) / 2, ("what is freed is given back", before, sizes)
