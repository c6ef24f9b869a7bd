"""Long prompts and those who decode beside them."""

from msgspec.structs import replace

from headrace_worker.loop import IterationLoop
from headrace_worker.pacing import FIRST_CHUNK, LONG_TOKENS, Pacer
from tests.worker.loop_builders import RecordingEngine, admission, run_until_idle


def test_a_chunk_costs_what_the_slowdown_allows() -> None:
    pacer = Pacer(1.5, 2048)
    assert pacer.allowance(1) == FIRST_CHUNK, "nothing is known yet"
    for _ in range(50):
        pacer.observe(16, 0, 0.010)
        pacer.observe(16, 100, 0.020)
    assert 45 <= pacer.allowance(1) <= 50, "half of 10 ms at 0.1 ms a token"
    assert pacer.allowance(2) == 4 * pacer.allowance(1) and pacer.allowance(4) == 2048
    assert pacer.allowance(0) == Pacer(0.0, 2048).allowance(1) == 2048
    assert not pacer.is_long(2048) and pacer.is_long(2049) and Pacer(1.5, 256).is_long(LONG_TOKENS + 1)


def test_a_long_prompt_comes_in_small_chunks_beside_decodes_and_at_full_speed_alone() -> None:
    engine = RecordingEngine(tokens_per_iteration=256)
    loop = IterationLoop(engine, decode_slowdown=1.5)
    blocks = range(1, 129)
    loop.admit(admission(2, [7] * 1500, blocks, max_tokens=1))
    loop.step()
    assert engine.iterations[-1] == [(2, 0, 256)]
    loop.admit(admission(1, [5, 6, 7], [0], max_tokens=9))
    loop.step()
    loop.step()
    assert (1, 3, 1) in engine.iterations[-1]
    assert next(num_tokens for sequence, _, num_tokens in engine.iterations[-1] if sequence == 2) < 256
    assert run_until_idle(loop).finish.keys() == {1, 2}


def test_a_short_prompt_passes_a_long_one_that_keeps_half() -> None:
    engine = RecordingEngine(tokens_per_iteration=64)
    loop = IterationLoop(engine)
    loop.admit(admission(1, [7] * 200, range(1, 20), max_tokens=1))
    loop.admit(admission(2, [5] * 20, range(20, 23), max_tokens=1))
    loop.admit(admission(3, [6] * 20, range(23, 26), max_tokens=1))
    loop.step()
    assert engine.iterations[-1] == [(1, 0, 44), (2, 0, 20)], "no more than half goes to those behind"
    run_until_idle(loop)


def test_prompts_behind_a_lower_rank_make_its_iteration_no_longer_than_need_be() -> None:
    engine = RecordingEngine(tokens_per_iteration=64)
    loop = IterationLoop(engine)
    loop.admit(admission(1, [7] * 40, range(0, 4), max_tokens=1))
    loop.admit(replace(admission(2, [5] * 10, [4, 5], max_tokens=1), rank=-1))
    loop.step()
    assert engine.iterations[-1] == [(2, 0, 10), (1, 0, 2)]
    loop.step()
    assert engine.iterations[-1] == [(1, 2, 38)]
    run_until_idle(loop)


def test_prompts_go_by_rank_and_then_by_admission() -> None:
    engine = RecordingEngine(tokens_per_iteration=16)
    loop = IterationLoop(engine)
    loop.admit(admission(1, [7] * 16, [0, 1], max_tokens=1))
    loop.admit(replace(admission(2, [5] * 16, [2, 3], max_tokens=1), rank=-1))
    loop.step()
    assert engine.iterations[-1] == [(2, 0, 16)]
    assert run_until_idle(loop).finish.keys() >= {1}


def test_where_places_are_scarce_a_prompt_of_a_lower_rank_takes_that_of_one_who_decodes() -> None:
    engine = RecordingEngine(max_sequences=2)
    loop = IterationLoop(engine)
    loop.admit(admission(1, [7, 8], [0], max_tokens=4))
    loop.admit(admission(2, [5, 6], [1], max_tokens=4))
    loop.step()
    loop.admit(admission(3, [1, 2], [2], max_tokens=4))
    loop.admit(replace(admission(4, [3, 4], [3], max_tokens=2), rank=-1))
    loop.step()
    assert engine.iterations[-1] == [(1, 2, 1), (4, 0, 2)], "its equals wait for a place, those who go before do not"
    loop.step()
    assert engine.iterations[-1] == [(4, 2, 1), (1, 3, 1)]
    assert run_until_idle(loop).finish.keys() == {1, 2, 3}
