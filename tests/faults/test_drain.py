"""Workers that are drained, parked and promoted under load, and what may go wrong meanwhile: real processes."""

import asyncio
import signal
from collections.abc import Sequence

import psutil
import pytest

from headrace_shared.fleet_messages import CommandKind, WorkerState
from tests.integration.deployment import (
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

pytestmark = [pytest.mark.nats, pytest.mark.e2e, pytest.mark.timeout(600)]

DRAIN, PARK, PROMOTE = CommandKind.DRAIN, CommandKind.PARK, CommandKind.PROMOTE
NUM_TOKENS = 120
WAIT_S = 90.0
"""For what takes a second on a machine with nothing else to do."""


async def workers(deployment: Deployment, client: Client, count: int, **settings: object) -> None:
    values: dict[str, object] = {"step_s": 0.02, **settings}
    for number in range(1, count + 1):
        await deployment.worker(f"worker-{number}", **values)  # type: ignore[arg-type]  # settings of any type
    await until(lambda: client.gauge("scheduler-1", "num_workers") == count, WAIT_S, "adoption")


async def streams(client: Client, count: int = 8, num_tokens: int = NUM_TOKENS) -> list[Heard]:
    """Plain ones, one with three choices and one with log-probabilities, all of which have begun."""
    requests = [await client.submit([number, *PROMPT], max_tokens=num_tokens, seed=number) for number in range(count)]
    requests.append(await client.submit(PROMPT, max_tokens=num_tokens, seed=90, num_choices=3))
    requests.append(await client.submit(PROMPT, max_tokens=num_tokens, seed=91, num_logprobs=2))
    await until(lambda: all(len(heard.outputs.get(0, [])) > 5 for heard in requests), WAIT_S, "tokens")
    return requests


async def all_exact(client: Client, requests: Sequence[Heard], num_tokens: int = NUM_TOKENS) -> None:
    await ended(*requests, timeout_s=WAIT_S)
    await until_empty(client, WAIT_S)
    for heard in requests:
        assert_complete(heard, num_tokens)
        if heard.request.sampling.num_logprobs is not None:
            assert len(heard.logprobs[0]) == num_tokens
            assert all(len(told.top) == heard.request.sampling.num_logprobs for told in heard.logprobs[0])


def num_moved(requests: Sequence[Heard]) -> int:
    return sum(any(attempts != {0} for attempts in heard.attempts.values()) for heard in requests)


async def has_left(deployment: Deployment, worker: str, timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        assert await deployment.processes[worker].wait() == 0
    del deployment.processes[worker]


async def test_a_worker_whose_terminal_is_closed_hands_its_streams_over(deployment: Deployment, client: Client) -> None:
    """Everybody in the terminal is told, the worker's own processes too."""
    await deployment.scheduler(move_after_s=0.3)
    await workers(deployment, client, 2)
    requests = await streams(client)
    worker = psutil.Process(deployment.processes["worker-1"].pid)
    for process in (worker, *worker.children(recursive=True)):
        process.send_signal(signal.SIGHUP)
    await has_left(deployment, "worker-1")
    await all_exact(client, requests)


async def test_a_drained_worker_leaves_and_every_stream_goes_on(deployment: Deployment, client: Client) -> None:
    """With requests that wait in the queue, and some whose long prompt is being computed."""
    await deployment.scheduler(move_after_s=0.3)
    await workers(deployment, client, 2, max_sequences=8, tokens_per_iteration=64)
    requests = await streams(client)
    long = [await client.submit(list(range(500, 900)), max_tokens=30, seed=seed) for seed in range(4)]
    waiting = [await client.submit([7, number], max_tokens=20, seed=number) for number in range(12)]
    reply = await client.command("worker-1", DRAIN)
    assert reply.is_accepted and "moved to others" in reply.message, reply
    await has_left(deployment, "worker-1")
    assert not all(heard.endings for heard in requests), "it has waited for the last one"
    await all_exact(client, requests)
    await ended(*long, *waiting, timeout_s=WAIT_S)
    for heard in long:
        assert_complete(heard, 30)
    for heard in waiting:
        assert_complete(heard, 20)
    assert num_moved(requests) > 0 and client.gauge("scheduler-1", "num_losses") == 0
    await blocks_return(client, "worker-2")


async def test_two_of_three_at_once(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(move_after_s=0.2)
    await workers(deployment, client, 3)
    requests = await streams(client, 12)
    replies = await asyncio.gather(*(client.command(worker, DRAIN) for worker in ("worker-1", "worker-3")))
    assert all(reply.is_accepted for reply in replies), replies
    await asyncio.gather(*(has_left(deployment, worker) for worker in ("worker-1", "worker-3")))
    await all_exact(client, requests)
    assert num_moved(requests) > 0
    assert client.states["worker-2"] is WorkerState.READY


async def test_a_stopped_worker_is_gone_long_before_its_streams_would_have_ended(
    deployment: Deployment, client: Client
) -> None:
    """SIGTERM, with a stream of a minute, one more request that has not begun, and a new one meanwhile."""
    await deployment.scheduler(move_after_s=0.2)
    await deployment.worker("worker-1", step_s=0.1, max_sequences=1, drain_timeout_s=60.0)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1, WAIT_S, "adoption")
    long = await client.submit(PROMPT, max_tokens=600)
    fetched = await client.submit(PROMPT, max_tokens=20, seed=1)
    await until(lambda: len(long.outputs.get(0, [])) > 3, what="tokens")
    stopping = asyncio.create_task(deployment.stop("worker-1"))
    await until(lambda: client.states["worker-1"] is WorkerState.DRAINING, what="a draining worker")
    new = await client.submit(PROMPT, max_tokens=20, seed=2)
    assert not fetched.outputs
    await deployment.worker("worker-2", step_s=0.002)
    assert await stopping == 0
    await ended(long, fetched, new, timeout_s=WAIT_S)
    await until_empty(client, WAIT_S)
    assert_complete(long, 600)
    assert_complete(fetched, 20)
    assert_complete(new, 20)
    assert long.attempts == {0: {0, 1}}


async def test_the_last_worker_stays_while_work_waits_or_comes(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(move_after_s=0.1)
    await workers(deployment, client, 1, max_sequences=2)
    requests = [await client.submit(PROMPT, max_tokens=40, seed=seed) for seed in range(8)]
    await until(lambda: requests[0].outputs.get(0), what="tokens")
    reply = await client.command("worker-1", DRAIN)
    assert not reply.is_accepted and "work waits" in reply.message
    await all_exact(client, requests, 40)
    assert client.states["worker-1"] is WorkerState.READY
    # With nothing in the queue it may go when it has finished what it runs, unless more comes.
    first = await client.submit(PROMPT, max_tokens=100)
    await until(lambda: first.outputs.get(0), what="tokens")
    reply = await client.command("worker-1", DRAIN)
    assert reply.is_accepted and "to their end" in reply.message
    second = await client.submit(PROMPT, max_tokens=20, seed=1)
    await all_exact(client, [first], 100)
    await all_exact(client, [second], 20)
    assert (await client.command("worker-1", DRAIN)).is_accepted
    await has_left(deployment, "worker-1")
    assert num_moved([*requests, first, second]) == 0


async def test_a_peers_worker_takes_over(deployment: Deployment, client: Client) -> None:
    """Two schedulers with one worker each."""
    await deployment.scheduler("scheduler-1", move_after_s=0.2)
    await workers(deployment, client, 1, step_s=0.2)  # so that no stream ends before there is a second one
    requests = await streams(client, num_tokens=300)
    await deployment.scheduler("scheduler-2")
    await until(lambda: "scheduler-2" in client.telemetry, WAIT_S, "the second scheduler")
    await deployment.worker("worker-2", step_s=0.002)
    await until(lambda: client.gauge("scheduler-2", "num_workers") == 1.0, WAIT_S, "adoption by the second scheduler")
    assert (await client.command("worker-1", DRAIN)).is_accepted
    await has_left(deployment, "worker-1")
    await all_exact(client, requests, 300)
    assert num_moved(requests) > 0


async def test_a_scheduler_that_dies_in_the_middle_of_a_drain(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler("scheduler-1", move_after_s=0.5)
    await workers(deployment, client, 2)
    requests = await streams(client, num_tokens=150)
    assert (await client.command("worker-1", DRAIN)).is_accepted
    await deployment.kill("scheduler-1")
    await deployment.scheduler("scheduler-2", move_after_s=0.2)
    await has_left(deployment, "worker-1")
    await all_exact(client, requests, 150)
    await blocks_return(client, "worker-2")


async def test_a_worker_that_is_killed_in_the_middle_of_its_drain(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(move_after_s=0.1)
    await workers(deployment, client, 2, max_sequences=8)  # so that not all can move at once
    requests = await streams(client, 10)
    assert (await client.command("worker-1", DRAIN)).is_accepted
    await until(lambda: num_moved(requests) > 0, WAIT_S, "a moved sequence")
    await deployment.kill("worker-1")
    await all_exact(client, requests)
    await blocks_return(client, "worker-2")


async def test_parked_under_load_and_promoted_when_work_comes(deployment: Deployment, client: Client) -> None:
    await deployment.scheduler(move_after_s=0.2)
    await workers(deployment, client, 2)
    requests = await streams(client)
    assert (await client.command("worker-1", PARK, epoch=3)).is_accepted
    await until(lambda: client.states["worker-1"] is WorkerState.PARKED, WAIT_S, "a parked worker")
    await until(lambda: client.telemetry["worker-1"].state == "parked", what="telemetry")
    await all_exact(client, requests)
    await until(lambda: client.gauge("scheduler-1", "num_workers") == 1, what="one worker")
    refused = await client.command("worker-1", PROMOTE, epoch=2)
    assert not refused.is_accepted and client.states["worker-1"] is WorkerState.PARKED
    # Nobody else is there: what is queued waits for the promotion.
    assert (await client.command("worker-2", DRAIN)).is_accepted
    await has_left(deployment, "worker-2")
    waiting = await client.submit(PROMPT, max_tokens=20)
    await asyncio.sleep(0.3)
    assert not waiting.outputs
    assert (await client.command("worker-1", PROMOTE, epoch=3)).state is WorkerState.READY
    await ended(waiting, timeout_s=WAIT_S)
    assert_complete(waiting, 20)
    await blocks_return(client, "worker-1")
