"""The engine that is no process, seen from where a process would be."""

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import BlockId, Extension, Grant, SequenceId, WorkerId
from headrace_worker.engine_frames import FromEngine, Iteration, Load, Loaded, Loading, Refused, Reset, TokenizerPart
from headrace_worker.engine_link import EngineDied
from headrace_worker.settings import WorkerSettings
from headrace_worker.timing.cards import Cards
from headrace_worker.timing.link import TimingLink
from headrace_worker.timing.tokens import TokenStream
from tests.worker.loop_builders import admission


class FakeCards(Cards):
    async def read(self, model: str, served_name: str) -> ModelCard:
        if model == "missing":
            raise ConfigError("model", "there is no model 'missing'")
        return ModelCard(model=model, tokenizer=b"{}", vocab_size=49_152, context=8192, eos_token_ids=(2,))


def started(settings: WorkerSettings, num_gpus: int = 1) -> TimingLink:
    link = TimingLink(settings, settings.engine_config(), num_gpus, FakeCards())
    link.send(Load(config=settings.engine_config()))
    return link


async def until(link: TimingLink, kind: type[FromEngine]) -> list[FromEngine]:
    frames: list[FromEngine] = []
    while not frames or not isinstance(frames[-1], kind):
        frames.append(await link.read())
    return frames


def grant(number: int = 1, **fields: Any) -> Grant:
    return Grant(worker=WorkerId("w"), epoch=1, number=number, progress_seen=0, **fields)


async def answer(link: TimingLink) -> tuple[list[int], float]:
    """Tokens until a sequence is released, and the time that the engine says it took."""
    tokens: list[int] = []
    elapsed_s = 0.0
    while True:
        frame = await link.read()
        assert isinstance(frame, Iteration)
        tokens += [row.token for row in frame.rows if row.token is not None]
        elapsed_s += frame.elapsed_s
        if frame.released:
            return tokens, elapsed_s


async def test_it_loads_as_a_process_does_and_tells_what_the_gpu_holds() -> None:
    link = started(WorkerSettings(engine="timing", gpu="h200", timing_load_s=0.2))
    try:
        begun = time.monotonic()
        frames = await until(link, Loaded)
        assert time.monotonic() - begun >= 0.2
        assert {frame.stage for frame in frames if isinstance(frame, Loading)} == {
            "reading the tokenizer",
            "loading weights",
        }
        assert b"".join(frame.data for frame in frames if isinstance(frame, TokenizerPart)) == b"{}"
        facts = frames[-1]
        assert isinstance(facts, Loaded)
        assert facts.device == "timing:h200" and facts.num_blocks > 40_000 and facts.context == 131_072
        assert (facts.max_sequences, facts.tokens_per_iteration) == (256, 2048)
        assert not facts.card.constrained_decoding, "routers must know what its answers cannot be held to"
    finally:
        await link.close()


async def test_an_answer_takes_the_time_of_the_gpu_and_has_the_tokens_of_its_request() -> None:
    link = started(WorkerSettings(engine="timing"))
    try:
        await until(link, Loaded)
        asked = admission(1, [5] * 1000, range(70), max_tokens=40, seed=3)
        begun = time.monotonic()
        link.send(grant(admissions=(asked,)))
        tokens, elapsed_s = await answer(link)
        took_s = time.monotonic() - begun
        stream = TokenStream(asked.request, 0, 49_152, 0)
        assert tokens == [stream.token(index) for index in range(40)]
        assert 0.25 < elapsed_s < 0.4  # a thousand tokens of prompt, then 39 readings of 16 GB
        assert elapsed_s - 0.02 < took_s < elapsed_s + 10
    finally:
        await link.close()


async def test_what_must_follow_a_grammar_fails_alone() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b"))
    try:
        await until(link, Loaded)
        plain, constrained = (admission(number, [5, 6], range(4), max_tokens=20) for number in (1, 2))
        sampling = replace(constrained.request.sampling, grammar="%llguidance {}")
        constrained = replace(constrained, request=replace(constrained.request, sampling=sampling))
        link.send(grant(admissions=(plain, constrained)))
        errors: dict[int, str | None] = {}
        while len(errors) < 2:
            frame = await link.read()
            assert isinstance(frame, Iteration)
            errors |= {row.sequence_id: row.error for row in frame.rows if row.finish or row.error}
        assert errors[1] is None
        assert errors[2] == "A simulated worker gives no text that follows a grammar or avoids tokens."
    finally:
        await link.close()


async def test_another_worker_goes_on_where_one_stopped() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b"))
    try:
        await until(link, Loaded)
        link.send(grant(1, admissions=(admission(1, [5, 6], range(4), max_tokens=30, seed=9),)))
        whole, _ = await answer(link)
        link.send(grant(2, admissions=(admission(2, [5, 6], range(4), max_tokens=30, seed=9, output=whole[:11]),)))
        rest, _ = await answer(link)
        assert whole[11:] == rest
    finally:
        await link.close()


async def test_a_sequence_without_a_block_waits_for_one() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b"))
    try:
        await until(link, Loaded)
        link.send(grant(1, admissions=(admission(1, [5, 6], [0], max_tokens=20),)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await answer(link)
        link.send(grant(2, extensions=(Extension(SequenceId(1), (BlockId(1),)),)))
        assert (await answer(link))[0]
    finally:
        await link.close()


async def test_a_reset_drops_what_ran() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b"))
    try:
        await until(link, Loaded)
        link.send(grant(1, admissions=(admission(1, [5, 6], range(100), max_tokens=1000),)))
        await until(link, Iteration)
        link.send(Reset(generation=1))
        link.send(grant(1, admissions=(admission(1, [5, 6], range(4), max_tokens=5),)))
        while True:
            frame = await link.read()
            assert isinstance(frame, Iteration)
            if frame.generation == 1 and frame.released:
                return
    finally:
        await link.close()


async def test_a_crash_comes_after_as_many_tokens_as_it_was_told() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b", timing_crash_after=10))
    try:
        await until(link, Loaded)
        link.send(grant(1, admissions=(admission(1, [5, 6], range(100), max_tokens=1000),)))
        num_tokens = 0
        with pytest.raises(EngineDied, match="exit code 1"):
            while True:
                frame = await link.read()
                assert isinstance(frame, Iteration)
                num_tokens += len(frame.rows)
        assert num_tokens == 9
        with pytest.raises(EngineDied):
            link.send(Reset(generation=1))
    finally:
        await link.close()


async def test_a_hang_says_nothing_more() -> None:
    link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b", timing_hang_after=10))
    try:
        await until(link, Loaded)
        link.send(grant(1, admissions=(admission(1, [5, 6], range(100), max_tokens=1000),)))
        for _ in range(9):
            await link.read()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await link.read()
    finally:
        await link.close()


async def test_a_slow_worker_takes_so_many_times_as_long() -> None:
    durations = []
    for slowdown in (1.0, 4.0):
        link = started(WorkerSettings(engine="timing", gpu_model="llama-3.2-1b", timing_slowdown=slowdown))
        try:
            await until(link, Loaded)
            link.send(grant(1, admissions=(admission(1, [5, 6], range(4), max_tokens=20),)))
            durations.append((await answer(link))[1])
        finally:
            await link.close()
    assert durations[1] == pytest.approx(4 * durations[0])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (WorkerSettings(engine="timing", model="missing"), "model"),
        (WorkerSettings(engine="timing", gpu="l4", gpu_model="llama-3.1-70b"), "gpu_model"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(settings: WorkerSettings, key: str) -> None:
    link = started(settings)
    try:
        refused = (await until(link, Refused))[-1]
        assert isinstance(refused, Refused) and refused.key == key
    finally:
        await link.close()


@pytest.mark.parametrize("key", ["gpu", "gpu_model"])
async def test_unknown_hardware_is_refused_before_anything_starts(key: str) -> None:
    with pytest.raises(ConfigError, match="none of") as refusal:
        started(replace(WorkerSettings(engine="timing"), **{key: "nonsense"}))
    assert refusal.value.key == key
