"""Groups of real rank processes on the scripted engine, which checks every slice and block on every rank."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import Iteration, Load, Loaded, Refused, Reset
from headrace_worker.parallel.local_group import start_local_group
from headrace_worker.parallel.rank_group import RankGroup, RankLost
from tests.scripted_engine import HANG_AT, expected_output
from tests.worker.parallel.scripted_ranks import RAISE_ON_RANK_1
from tests.worker.service_bench import grant_of

MODULE = "tests.worker.parallel.scripted_ranks"
PROMPT = [7, 8, 9]
HANG_TIMEOUT_S = 2.5
"""Of the tests in which something hangs."""
HANG_TIMEOUT_OF_OTHERS_S = 40.0


@asynccontextmanager
async def loaded_group(
    tensor_parallel: int, pipeline_parallel: int, hang_timeout_s: float = HANG_TIMEOUT_OF_OTHERS_S
) -> AsyncIterator[tuple[RankGroup, list[int]]]:
    """A group that serves, and the process ids of its ranks; afterwards none of them is left."""
    group = await start_local_group(MODULE, tensor_parallel, pipeline_parallel, hang_timeout_s)
    pids = [link.pid for link in group._links]
    try:
        group.send(Load(config=EngineConfig(model="scripted", num_blocks=64)))
        async with asyncio.timeout(60.0):
            while not isinstance(await group.read(), Loaded):
                pass
        yield group, pids
    finally:
        await group.close()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def tokens_of(group: RankGroup, num_tokens: int, generation: int = 0) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(60.0):
        while len(tokens) < num_tokens:
            frame = await group.read()
            if isinstance(frame, Iteration) and frame.generation == generation:
                tokens += [row.token for row in frame.rows if row.token is not None]
    return tokens


async def loss_of(group: RankGroup) -> tuple[str, float]:
    """Why the group is given up, and the seconds until then."""
    start = time.monotonic()
    with pytest.raises(RankLost) as caught:
        async with asyncio.timeout(60.0):
            while True:
                await group.read()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (1, 2), (2, 2)])
async def test_ranks_compute_what_is_granted_and_forget_it_on_a_reset(
    tensor_parallel: int, pipeline_parallel: int
) -> None:
    async with loaded_group(tensor_parallel, pipeline_parallel) as (group, _):
        group.send(grant_of(1, PROMPT))
        assert await tokens_of(group, 4) == expected_output(PROMPT, 0, 0, 4)
        group.send(grant_of(2, PROMPT, max_tokens=40))
        group.send(Reset(generation=1))
        group.send(grant_of(2, PROMPT, max_tokens=30))
        assert await tokens_of(group, 30, generation=1) == expected_output(PROMPT, 0, 0, 30)


@pytest.mark.parametrize("victim", [0, 3])
async def test_a_killed_rank_takes_the_group_down_and_is_named(victim: int) -> None:
    async with loaded_group(2, 2) as (group, pids):
        group.send(grant_of(1, PROMPT, max_tokens=1000))
        await tokens_of(group, 5)
        psutil.Process(pids[victim]).send_signal(signal.SIGKILL)
        reason, seconds = await loss_of(group)
        assert reason == f"the group of 4 ranks is lost: rank {victim} was killed by signal 9"
        assert seconds < HANG_TIMEOUT_OF_OTHERS_S


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_stopped_rank_is_noticed_in_time_even_while_nothing_is_to_be_computed(victim: int) -> None:
    async with loaded_group(2, 1, HANG_TIMEOUT_S) as (group, pids):
        psutil.Process(pids[victim]).send_signal(signal.SIGSTOP)
        reason, seconds = await loss_of(group)
        assert f"rank {victim} has given no sign of life" in reason
        assert seconds < HANG_TIMEOUT_S + 15.0


async def test_a_rank_that_raises_says_what() -> None:
    async with loaded_group(2, 1) as (group, _):
        group.send(grant_of(1, [RAISE_ON_RANK_1, 2]))
        reason, seconds = await loss_of(group)
        assert "rank 1 failed: RuntimeError: scripted failure" in reason
        assert seconds < HANG_TIMEOUT_OF_OTHERS_S


async def test_a_rank_that_hangs_is_given_up_and_its_stack_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    async with loaded_group(1, 2, HANG_TIMEOUT_S) as (group, _):
        group.send(grant_of(1, [HANG_AT, 2]))
        reason, seconds = await loss_of(group)
        assert "did not get on with an iteration" in reason
        assert seconds < HANG_TIMEOUT_S + 15.0
    assert "in mishap" in capfd.readouterr().err


async def test_what_a_rank_refuses_is_passed_on_with_its_setting() -> None:
    group = await start_local_group(MODULE, 2, 1, HANG_TIMEOUT_S)
    try:
        group.send(Load(config=EngineConfig(model="missing")))
        async with asyncio.timeout(60.0):
            while not isinstance(frame := await group.read(), Refused):
                pass
        assert frame.key == "model"
    finally:
        await group.close()
