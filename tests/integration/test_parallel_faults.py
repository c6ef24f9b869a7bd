"""Workers of several ranks, on one machine and on two, that lose a rank or a machine: their sequences go on."""

import asyncio
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from headrace_shared.messages import SamplingParams
from tests.integration.deployment import (
    MODEL,
    PROMPT,
    Client,
    Deployment,
    Heard,
    assert_complete,
    blocks_return,
    ended,
    until,
    until_empty,
)
from tests.worker.checkpoints import load_tiny, save_checkpoint
from tests.worker.engine_driver import generate
from tests.worker.parallel.scripted_ranks import RAISE_ON_RANK_1

pytestmark = pytest.mark.nats

ENGINE = "tests.worker.parallel.scripted_ranks"
NUM_TOKENS = 150
HANG_TIMEOUT_S = 4.0
END_S = 30.0
"""The group is gone within two seconds; the rest is for the process to end and for a slow machine."""


def ranks_of(deployment: Deployment, *workers: str) -> dict[int, int]:
    """Rank -> process id, as the workers' logs say. Only of their last start."""
    ranks = {}
    for worker in workers:
        for line in deployment.log(worker).splitlines():
            if '"rank started"' in line:
                said = json.loads(line)
                ranks[int(said["rank"])] = int(said["pid"])
    return ranks


def reason_of(deployment: Deployment, worker: str) -> str:
    """Why it failed, in the one line that says so."""
    said = [json.loads(line) for line in deployment.log(worker).splitlines() if '"service failed"' in line]
    assert len(said) == 1, deployment.log(worker)
    return str(said[0]["reason"])


async def running_requests(deployment: Deployment, client: Client, num_tokens: int = NUM_TOKENS) -> list[Heard]:
    """On a worker of two ranks and an ordinary one, both busy."""
    await deployment.scheduler()
    await deployment.worker("worker-1", engine=ENGINE, step_s=0.02, tensor_parallel=2, hang_timeout_s=HANG_TIMEOUT_S)
    await deployment.worker("worker-2", step_s=0.02)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 2.0, what="adoption")
    requests = [await client.submit([number, *PROMPT], max_tokens=num_tokens, seed=number) for number in range(8)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 5 for heard in requests), what="tokens")
    await until(lambda: all(client.gauge(worker, "num_running") for worker in ("worker-1", "worker-2")), what="both")
    return requests


async def assert_moved(deployment: Deployment, client: Client, requests: list[Heard]) -> None:
    await ended(*requests)
    await until_empty(client)
    assert any(heard.attempts[0] != {0} for heard in requests)
    for heard in requests:
        assert_complete(heard, heard.request.stop.max_tokens)
    await blocks_return(client, "worker-2")


async def assert_gone(deployment: Deployment, worker: str, ranks: dict[int, int], within_s: float) -> None:
    start = time.monotonic()
    async with asyncio.timeout(within_s):
        assert await deployment.processes.pop(worker).wait() == 1
    await until(lambda: not any(psutil.pid_exists(pid) for pid in ranks.values()), what="the ranks' end")
    assert time.monotonic() - start < within_s


async def test_a_stopped_rank_ends_its_worker_before_the_hang_timeout(deployment: Deployment, client: Client) -> None:
    requests = await running_requests(deployment, client, num_tokens=400)
    assert all(client.gauge("worker-1", f"rank_{rank}_memory_bytes") for rank in (0, 1))
    ranks = ranks_of(deployment, "worker-1")
    psutil.Process(ranks[1]).send_signal(signal.SIGSTOP)
    await assert_gone(deployment, "worker-1", ranks, HANG_TIMEOUT_S + END_S)
    assert "rank 1 has given no sign of life" in reason_of(deployment, "worker-1")
    await assert_moved(deployment, client, requests)


async def test_a_rank_that_raises_ends_its_worker_with_the_reason(deployment: Deployment, client: Client) -> None:
    requests = await running_requests(deployment, client)
    ranks = ranks_of(deployment, "worker-1")
    # Some of them come to the worker of two ranks; the other one has no rank 1.
    requests += [await client.submit([RAISE_ON_RANK_1, 5 + number], max_tokens=NUM_TOKENS) for number in range(4)]
    await assert_gone(deployment, "worker-1", ranks, END_S)
    assert "rank 1 failed: RuntimeError: scripted failure" in reason_of(deployment, "worker-1")
    await assert_moved(deployment, client, requests)


async def start_nodes(deployment: Deployment, epoch: str = "") -> tuple[str, str]:
    names = (f"worker-1{epoch}", f"node-1{epoch}")
    for node_rank, name in enumerate(names):
        await deployment.worker(
            name,
            engine=ENGINE,
            step_s=0.02,
            tensor_parallel=2,
            num_nodes=2,
            node_rank=node_rank,
            group="g",
            hang_timeout_s=HANG_TIMEOUT_S,
        )
    return names


async def test_a_worker_on_two_machines_ends_when_one_is_killed_or_freezes_and_comes_again_in_another_epoch(
    deployment: Deployment, client: Client
) -> None:
    await deployment.scheduler()
    names = await start_nodes(deployment)
    first = await client.submit(PROMPT, max_tokens=20)
    await ended(first)
    assert_complete(first, 20)
    ranks = ranks_of(deployment, *names)
    assert set(ranks) == {0, 1}
    running = [await client.submit([number, *PROMPT], max_tokens=NUM_TOKENS, seed=number) for number in range(4)]
    await until(lambda: all(len(heard.outputs.get(0, [])) > 5 for heard in running), what="tokens")
    await deployment.kill(names[1])
    await assert_gone(deployment, names[0], ranks, END_S)
    assert "rank 1" in reason_of(deployment, names[0])
    names = await start_nodes(deployment, "-again")
    await ended(*running)
    await until_empty(client)
    for heard in running:
        assert_complete(heard, NUM_TOKENS)
        assert heard.attempts[0] != {0}
    assert '"epoch": 2' in deployment.log(names[1])
    for pid in (deployment.processes[names[1]].pid, ranks_of(deployment, names[1])[1]):
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    async with asyncio.timeout(HANG_TIMEOUT_S + END_S):
        assert await deployment.processes.pop(names[0]).wait() == 1
    assert "node 1 has given no sign of life" in reason_of(deployment, names[0])


async def test_a_machine_that_is_to_stop_lets_the_worker_finish_what_runs(
    deployment: Deployment, client: Client
) -> None:
    await deployment.scheduler()
    names = await start_nodes(deployment)
    running = await client.submit(PROMPT, max_tokens=60)
    await until(lambda: len(running.outputs.get(0, [])) > 5, what="tokens")
    codes = [deployment.processes[names[0]].wait(), deployment.stop(names[1])]
    assert await asyncio.gather(*codes) == [0, 0]
    del deployment.processes[names[0]]
    assert_complete(running, 60)
    assert running.attempts == {0: {0}}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised while transformers is imported
async def test_a_model_on_two_machines_gives_the_tokens_that_it_gives_on_one(
    deployment: Deployment, client: Client, tmp_path: Path
) -> None:
    """Two stages of a tiny random model, each on a machine of its own."""
    folder = tmp_path / "model"
    save_checkpoint(folder)
    prompt = list(range(5, 40))
    expected = generate(load_tiny(folder), prompt, 16, SamplingParams(seed=3))
    await deployment.scheduler()
    for node_rank, name in enumerate(("worker-1", "node-1")):
        await deployment.worker(
            name,
            engine="headrace_worker.engine_process",
            model=str(folder),
            served_name=MODEL,
            device="cpu",
            dtype="float32",
            num_blocks=64,
            block_size=8,
            num_threads=1,
            pipeline_parallel=2,
            num_nodes=2,
            node_rank=node_rank,
            group="g",
        )
    heard = await client.submit(prompt, max_tokens=16, seed=3)
    await ended(heard, timeout_s=150.0)
    assert heard.outputs[0] == expected
    assert set(ranks_of(deployment, "worker-1", "node-1")) == {0, 1}
