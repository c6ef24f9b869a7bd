"""Every kind of hostile request beside ordinary streams: nobody else notices, and nothing dies of it."""

import asyncio
from collections import Counter
from random import Random

import httpx
import pytest

from tests.e2e.api import CHAT, TEXT, WAYS, ask
from tests.e2e.attacks import ATTACKS, GAVE_UP, Attacker, attack, lasting
from tests.e2e.broker_view import broker_view
from tests.e2e.launcher import Launched

pytestmark = [pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

TELLS = "The quick brown fox — “zażółć gęślą jaźń” 😀 "
ACCEPTED = ("nearly valid", "gone in the middle", "special tokens")
"""Of these some are requests like any other."""


async def test_ordinary_streams_get_their_tokens_whatever_others_send(scripted: Launched) -> None:
    pids = lasting(scripted)
    told: dict[str, Counter[int]] = {kind: Counter() for kind in ATTACKS}
    async with httpx.AsyncClient(base_url=scripted.url, timeout=60.0, trust_env=False) as client:
        attacker = Attacker(client, scripted.port, Random(7))

        async def stream(number: int) -> None:
            path, streamed = WAYS[number % len(WAYS)]
            said = f"{number} {TELLS * 3}"
            for _ in range(3):
                answer = await ask(client, path, {"text": said}, streamed, temperature=0, max_tokens=400)
                assert answer.text == said and answer.finish == "stop"

        async def repeat(kind: str) -> None:
            for _ in range(2):
                told[kind][await attack(attacker, kind)] += 1

        await asyncio.gather(*(stream(number) for number in range(16)), *(repeat(kind) for kind in ATTACKS))
        assert (await client.get("/health")).status_code == 200
        for path in (CHAT, TEXT):
            assert (await ask(client, path, {"text": "still here"})).text == "still here"
    for kind, statuses in told.items():
        assert all(status in (GAVE_UP, 503) or 400 <= status < 500 or kind in ACCEPTED for status in statuses), told
        assert not any(status in (500, 502, 504) for status in statuses), told
    assert pids == lasting(scripted), "a process has died"
    async with broker_view(scripted) as broker:
        for _ in range(600):
            if await broker.num_queued() == 0:
                break
            await asyncio.sleep(0.1)
        assert await broker.num_queued() == 0
