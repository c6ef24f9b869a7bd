"""The worker's I/O process around a real engine process with the scripted engine."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace_shared import telemetry
from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import WorkerState
from headrace_shared.messages import Grant, WorkerId
from headrace_shared.model_cards import load_card
from headrace_shared.telemetry import Instrument
from headrace_worker.config import EngineConfig
from headrace_worker.engine_frames import Iteration, Load, Loaded, Loading, Reset, TokenizerPart
from headrace_worker.engine_link import EngineDied, EngineLink
from headrace_worker.service import EngineHangs
from tests.scripted_engine import EXIT_AT, HANG_AT, expected_output
from tests.worker.loop_builders import admission
from tests.worker.service_bench import MODULE, PROMPT, Bench, grant_of


async def loaded_link(**config: int) -> EngineLink:
    link = await EngineLink.start(MODULE)
    link.send(Load(config=EngineConfig(model="scripted", **config)))  # type: ignore[arg-type]  # all ints here
    while not isinstance(await link.read(), Loaded):
        pass
    return link


async def test_an_engine_process_tells_its_stages_and_facts() -> None:
    link = await EngineLink.start(MODULE)
    try:
        link.send(Load(config=EngineConfig(model="scripted", num_blocks=8)))
        frames = [await link.read()]
        while not isinstance(frames[-1], Loaded):
            frames.append(await link.read())
        assert [frame.stage for frame in frames if isinstance(frame, Loading)] == ["script", "warming up"]
        assert b"".join(frame.data for frame in frames if isinstance(frame, TokenizerPart)) == b"{}"
        facts = frames[-1]
        assert isinstance(facts, Loaded) and (facts.num_blocks, facts.context) == (8, 128)
    finally:
        await link.close()


async def test_an_engine_process_runs_what_is_granted_and_resets() -> None:
    link = await loaded_link()
    try:
        link.send(grant_of(1, PROMPT))
        tokens: list[int] = []
        released = False
        while not released:
            frame = await link.read()
            assert isinstance(frame, Iteration) and frame.generation == 0
            tokens += [row.token for row in frame.rows if row.token is not None]
            released = frame.released == (1,)
        assert tokens == expected_output(PROMPT, 0, 0, 4)
        link.send(grant_of(2, PROMPT, max_tokens=40))
        link.send(Reset(generation=1))
        link.send(grant_of(2, PROMPT, max_tokens=3))
        tokens = []
        while len(tokens) < 3:
            frame = await link.read()
            assert isinstance(frame, Iteration)
            if frame.generation == 1:
                tokens += [row.token for row in frame.rows if row.token is not None]
        assert tokens == expected_output(PROMPT, 0, 0, 3)
    finally:
        await link.close()


async def test_a_dead_engine_process_is_noticed_with_its_exit_code() -> None:
    link = await loaded_link()
    try:
        link.send(grant_of(1, [EXIT_AT, 2]))
        with pytest.raises(EngineDied) as caught:
            while True:
                await link.read()
        assert caught.value.exit_code == 7
    finally:
        await link.close()


async def test_an_engine_process_dies_with_its_parent() -> None:
    """Even while the device is busy and the parent had no time to say anything."""
    script = (
        "import asyncio, sys\n"
        "from tests.worker.test_worker_service import HANG_AT, grant_of, loaded_link\n"
        "async def main():\n"
        "    link = await loaded_link()\n"
        "    link.send(grant_of(1, [HANG_AT, 0]))\n"
        "    print(link.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(20.0):
        engine = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 5.0
    while _is_running(engine):
        assert time.monotonic() < deadline, "the engine process outlives its parent"
        await asyncio.sleep(0.02)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.start()
    yield bench
    if bench.task is not None:
        bench.task.cancel()
        await asyncio.gather(bench.task, return_exceptions=True)


async def test_ready_only_after_a_token_and_with_its_card_stored(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    assert bench.hellos[0].state is WorkerState.LOADING and bench.hellos[0].num_blocks == 0
    ready = bench.hellos[-1]
    assert (ready.num_blocks, ready.block_size, ready.epoch) == (256, 16, 0)
    card = await load_card(bench.bus, "scripted")
    assert card is not None and card.tokenizer == b"{}"
    assert bench.service.not_ready() is None


async def test_tells_what_it_computes_and_holds(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    metrics = bench.service.metrics

    def figure(instrument: Instrument) -> float:
        made = metrics.gauge(instrument) if instrument.kind == "gauge" else metrics.counter(instrument)
        return float(made.labels("scripted")._value.get())

    bench.run_prompt(PROMPT, 60)
    await _until(lambda: figure(telemetry.DECODE_TOKENS) == 60)
    assert figure(telemetry.PREFILL_TOKENS) == len(PROMPT)
    assert figure(telemetry.ITERATIONS) >= 60
    assert (figure(telemetry.BLOCKS), figure(telemetry.RUNNING), figure(telemetry.STALLED)) == (256, 0, 0)
    bench.control(
        Grant(
            worker=WorkerId("worker-1"),
            epoch=1,
            number=2,
            progress_seen=0,
            admissions=(admission(2, PROMPT, range(2), max_tokens=60),),
        )
    )
    await _until(lambda: figure(telemetry.STALLED) == 1)  # two blocks hold 32 tokens
    assert (figure(telemetry.RUNNING), figure(telemetry.BLOCKS_REFERENCED)) == (1, 2)
    assert figure(telemetry.BLOCKS_FREE) == 254
    assert b'headrace_decode_tokens_total{model="scripted"} 90.0' in metrics.render()


async def test_drains_what_runs_then_leaves(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    bench.run_prompt(PROMPT, 60)
    await _until(lambda: len(bench.tokens) > 3)
    bench.service.drain()
    assert bench.task is not None
    assert await asyncio.wait_for(bench.task, 10.0) == 0
    assert bench.tokens == expected_output(PROMPT, 0, 0, 60)
    assert [hello.state for hello in bench.hellos[-2:]] == [WorkerState.DRAINING, WorkerState.LEAVING]


async def test_a_dead_engine_ends_the_service_and_is_told_at_once(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    bench.run_prompt([EXIT_AT, 2], 10)
    assert bench.task is not None
    with pytest.raises(EngineDied):
        await asyncio.wait_for(bench.task, 5.0)
    assert bench.hellos[-1].state is WorkerState.LEAVING


async def test_a_hanging_engine_ends_the_service(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    bench.run_prompt([HANG_AT, 2], 10)
    assert bench.task is not None
    with pytest.raises(EngineHangs):
        await asyncio.wait_for(bench.task, 5.0)


async def test_an_idle_or_stalled_engine_does_not_hang(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    bench.run_prompt(PROMPT, 1000)  # 8 blocks are not enough for that
    await _until(lambda: len(bench.tokens) == 8 * 16 - len(PROMPT) + 1)
    await asyncio.sleep(1.5)
    assert bench.task is not None and not bench.task.done()


async def test_stopped_while_loading() -> None:
    bench = Bench(load_timeout_s=60.0)
    await bench.start()
    await bench.until_state(WorkerState.LOADING)
    bench.service.drain()
    assert bench.task is not None
    assert await asyncio.wait_for(bench.task, 5.0) == 0
    assert (bench.hellos[-1].state, bench.hellos[-1].failure) == (WorkerState.LEAVING, "")


async def test_a_missing_model_is_a_config_error() -> None:
    bench = Bench(model="missing")
    await bench.start()
    assert bench.task is not None
    with pytest.raises(ConfigError, match="there is no model 'missing'"):
        await asyncio.wait_for(bench.task, 20.0)


async def test_sigkill_of_the_engine_alone(bench: Bench) -> None:
    await bench.until_state(WorkerState.READY)
    os.kill(_last_child(), signal.SIGKILL)
    assert bench.task is not None
    with pytest.raises(EngineDied):
        await asyncio.wait_for(bench.task, 5.0)
    assert bench.hellos[-1].state is WorkerState.LEAVING
    assert bench.hellos[-1].failure == "the engine process ended with exit code -9"


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _last_child() -> int:
    return int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()[-1])


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
