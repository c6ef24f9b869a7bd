"""A worker of two tensor-parallel ranks behind `headrace up`, with the real model."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.api import CHAT, TEXT, ask
from tests.e2e.launcher import Launched, launched
from tests.e2e.listeners import listeners_of

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.nats, pytest.mark.timeout(600)]

STORY = "Once upon a time there was a river that turned a wheel."


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    arguments = ("--tensor-parallel", "2", "--dtype", "float32", "--context", "512", "--no-autoscaler")
    environment = {"HEADRACE_NUM_BLOCKS": "64"}
    with launched(tmp_path_factory.mktemp("system"), *arguments, environment=environment) as launched_system:
        yield launched_system


def ranks_of(system: Launched) -> list[psutil.Process]:
    children = psutil.Process(system.pid("worker")).children()
    return sorted((child for child in children if "engine_process" in " ".join(child.cmdline())), key=lambda c: c.pid)


async def test_the_answer_is_that_of_one_rank(system: Launched) -> None:
    assert len(ranks_of(system)) == 2
    async with httpx.AsyncClient(base_url=system.url, timeout=60.0) as client:
        answer = await ask(client, CHAT, "What is the capital of France?", temperature=0)
    assert answer.text == "The capital of France is Paris."


def test_everything_listens_on_loopback_the_ranks_store_included(system: Launched) -> None:
    listeners = listeners_of(system)
    assert {"router", "nats", "worker", "scheduler"} <= set(listeners.values())
    assert {address for address, _ in listeners} == {"127.0.0.1"}


async def test_a_stream_survives_a_killed_rank(system: Launched) -> None:
    """The worker is started again, and the sequence goes on from the tokens that the client has."""
    async with httpx.AsyncClient(base_url=system.url, timeout=120.0) as client:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        expected = await ask(client, TEXT, STORY, stream=True, **fields)
        body = {"model": "smollm2-135m", "prompt": STORY, "stream": True, **fields}
        first, second = ranks_of(system)
        text, num_chunks = "", 0
        async with client.stream("POST", TEXT, json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
                num_chunks += 1
                if num_chunks == 5:
                    second.send_signal(signal.SIGKILL)
    assert text == expected.text
    gone, alive = psutil.wait_procs([first, second], timeout=60.0)
    assert len(gone) == 2 and not alive
    assert "rank 1 was killed by signal 9" in (system.data_dir / "logs" / "worker-1.log").read_text()
