"""The asynchronous engine on the host, under the real iteration loop with one iteration in flight."""

import pytest
import torch

from headrace_shared.messages import BlockId, Extension, SamplingParams, SequenceId
from headrace_worker.cuda.rehearsal import rehearse
from headrace_worker.iteration import SequenceSlice
from headrace_worker.pooling import Pooling
from headrace_worker.sampling import NOT_FINITE
from tests.worker.cuda import toy
from tests.worker.cuda.toy import VOCAB_SIZE, expected, toy_engine
from tests.worker.cuda.world import GREEDY, KINDS, World
from tests.worker.engine_driver import make_admission


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_give_what_each_sequence_would_get_alone(seed: int) -> None:
    engine, _ = toy_engine()
    world = World(engine, seed)
    for _ in range(120):
        if world.rng.random() < 0.25 and len(world.blocks) < 9 and len(world.free) > 20:
            prompt = [world.rng.randrange(VOCAB_SIZE) for _ in range(world.rng.randint(1, 30))]
            world.admit(prompt, world.rng.choice(KINDS), max_tokens=world.rng.randint(1, 16))
        if world.rng.random() < 0.03 and world.blocks:
            number = world.rng.choice(sorted(world.blocks))
            world.stopped.add(number)
            world.loop.release(number)
        world.extend()
        world.step()
    world.run()
    assert len(world.admissions) > 12
    for number, admission in world.admissions.items():
        world.check(number)
        if number not in world.stopped:
            assert len(world.output(number)) == admission.request.stop.max_tokens
    assert sorted(world.free) == list(range(engine.facts.num_blocks)) and world.loop.num_sequences == 0


def test_more_sequences_than_places_lose_and_regain_them() -> None:
    """Two may run at a time, five have places: seven sequences take turns, each stalling for its next block."""
    engine, _ = toy_engine(max_sequences=2, batch_sizes=(1, 2))
    world = World(engine, 1)
    numbers = [world.admit([number] * 5, KINDS[number], max_tokens=14) for number in range(9)]
    world.run()
    for number in numbers:
        world.check(number)
        assert len(world.output(number)) == 14


def test_a_stop_token_is_barred_until_its_time_and_then_ends_the_sequence() -> None:
    engine, _ = toy_engine()
    world = World(engine, 2)
    free = world.admit([5, 6, 7], GREEDY)
    world.run()
    third = world.output(free)[2]
    at_once = world.admit([5, 6, 7], GREEDY, stop=[third])
    later = world.admit([5, 6, 7], GREEDY, stop=[third], min_tokens=6)
    world.run()
    assert world.output(at_once)[-1] == third and len(world.output(at_once)) <= 3
    world.check(later)
    assert len(world.output(later)) >= 6 and third not in world.output(later)[:6]


def test_a_shared_prompt_is_copied_where_a_block_is_partly_filled() -> None:
    engine, _ = toy_engine()
    world = World(engine, 3)
    first = world.admit(list(range(10)), GREEDY, max_tokens=20)
    while not world.output(first):
        world.step()
    second = world.admit([*range(9), 40, 41], {"temperature": 1.0}, shares=first, num_cached=9)
    third = world.admit([*range(8), 50], {"temperature": 1.0}, shares=first, num_cached=8)
    world.loop.release(SequenceId(99))
    shared = world.blocks[first][:2]
    for number in (second, third):
        world.blocks[number] = [block for block in world.blocks[number] if block not in shared]
    while world.step() or world.loop.num_sequences:
        for number in list(world.blocks):
            if world.free:
                more = world.take(1)
                world.blocks[number] += more
                world.loop.extend(Extension(number, (BlockId(more[0]),)))
    for number in (first, second, third):
        world.check(number)


def test_a_sequence_goes_on_where_an_earlier_attempt_ended() -> None:
    sampling = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 77}
    engine, _ = toy_engine()
    world = World(engine, 4)
    whole = world.admit([1, 2, 3, 1], sampling, max_tokens=14)
    # The next one has to have the same choice to draw the same noise.
    world.admit([9], GREEDY), world.admit([9], GREEDY)
    world.run()
    part = world.admit([1, 2, 3, 1], sampling, max_tokens=14, output=world.output(whole)[:6])
    world.run()
    assert world.output(part) == world.output(whole)[6:]


def test_logits_that_are_not_finite_fail_their_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = toy.TABLE.clone()
    prompts = [[1], [2], [3]]
    state = (3 * 7) % toy.NUM_STATES
    table[state] = torch.nan
    monkeypatch.setattr(toy, "TABLE", table)
    engine, _ = toy_engine()
    world = World(engine, 5)
    numbers = [world.admit(prompt, kind, max_tokens=3) for prompt, kind in zip(prompts, KINDS, strict=False)]
    world.run()
    assert [row.error for row in world.rows[numbers[1]]] == [NOT_FINITE]
    for number in (numbers[0], numbers[2]):
        world.check(number)


def test_decoding_replays_the_next_recorded_size_and_prompts_do_not() -> None:
    engine, forward = toy_engine(batch_sizes=(1, 2, 4), max_sequences=6)
    world = World(engine, 6)
    forward.num_rows.clear()
    for count in range(1, 7):
        for _ in range(count):
            world.admit([count], GREEDY, max_tokens=2)
        world.run()
    # Prompts of one token that are sampled from are decoding too.
    assert set(forward.num_rows) == {1, 2, 4, 5, 6}
    forward.num_rows.clear()
    world.admit([1, 2, 3], GREEDY, max_tokens=1)
    world.run()
    assert forward.num_rows == [3]


def test_unknown_tokens_are_read_on_the_device() -> None:
    """Two iterations are queued before the first is collected, and the second knows none of its tokens."""
    engine, _ = toy_engine()
    blocks = [BlockId(block) for block in (9, 3, 5)]
    admission = make_admission([4, 2], SamplingParams(seed=1, temperature=0.0), block_ids=blocks)
    engine.add(admission)
    engine.submit([SequenceSlice(SequenceId(0), 0, 2, [4, 2], blocks, True)])
    engine.submit([SequenceSlice(SequenceId(0), 2, 1, None, blocks, True)])
    engine.submit([SequenceSlice(SequenceId(0), 3, 1, None, blocks, True)])
    tokens = [engine.collect()[0].token for _ in range(3)]
    assert tokens == expected(admission, 3)[0]


def test_a_rehearsal_leaves_no_trace() -> None:
    engine, forward = toy_engine(max_sequences=6, tokens_per_iteration=16)
    before = engine.cache.pages[:, :-1].clone()
    forward.num_rows.clear()
    rehearse(engine)
    assert torch.equal(engine.cache.pages[:, :-1], before)
    assert max(forward.num_rows) == 16
    world = World(engine, 7)
    numbers = [world.admit([number, 5], kind) for number, kind in enumerate(KINDS)]
    world.run()
    for number in numbers:
        world.check(number)


def test_a_rehearsal_has_the_hidden_states_of_a_whole_iteration_in_memory() -> None:
    """Else the measured peak leaves no room for embeddings."""
    engine, forward = toy_engine(
        max_sequences=6, tokens_per_iteration=16, pooling=Pooling(8, None, torch.device("cpu"))
    )
    rehearse(engine)
    assert forward.num_hidden == [16]
    world = World(engine, 7)
    number = world.admit([1, 5], GREEDY)
    world.run()
    world.check(number)
    assert forward.num_hidden == [16], "nobody else's are kept"


def test_logits_of_sequences_that_were_never_added() -> None:
    engine, _ = toy_engine()
    blocks = [BlockId(block) for block in (7, 1, 30)]
    other = [BlockId(block) for block in (2, 3)]
    slices = [
        SequenceSlice(SequenceId(1), 0, 5, [9, 8, 7, 6, 5], blocks, True),
        SequenceSlice(SequenceId(2), 0, 2, [1, 2], other, False),
        SequenceSlice(SequenceId(3), 0, 1, [4], [BlockId(11)], True),
    ]
    for _ in range(2):
        expected_rows = torch.cat([toy.toy_logits([9, 8, 7, 6, 5]), toy.toy_logits([4])])
        assert torch.equal(engine.logits(slices), expected_rows)


def test_a_sequence_that_left_before_it_ran_copies_nothing() -> None:
    engine, _ = toy_engine()
    before = engine.cache.pages.clone()
    gone = make_admission([1] * 6, sequence_id=1, block_ids=[4, 7], num_cached=5, copies=[(5, 7)])
    engine.cache.pages[:, 5] = 3.0
    engine.add(gone)
    engine.remove(SequenceId(1))
    engine.add(make_admission([1], sequence_id=2, block_ids=[9]))
    engine.submit([SequenceSlice(SequenceId(2), 0, 1, [1], [BlockId(9)], True)])
    engine.collect()
    assert torch.equal(engine.cache.pages[:, 7], before[:, 7])
