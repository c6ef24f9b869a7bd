"""Long prompts and those who decode beside them."""

from msgspec.structs import replace

from headrace_worker.loop import IterationLoop
from headrace_worker.pacing import (
    ALONE_EVERY,
    FIRST_CHUNK,
    LATELY,
    LONG_TOKENS,
    SHORT_HEADROOM,
    SHORT_ITERATIONS,
    SHORT_S,
    Pacer,
)
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


def paced(token_s: float, decode_s: float, tokens_per_iteration: int = 2048) -> Pacer:
    """One that knows what things cost."""
    pacer = Pacer(1.5, tokens_per_iteration)
    for _ in range(50):
        pacer.observe(16, 0, decode_s)
        pacer.observe(16, 100, decode_s + 100 * token_s)
    return pacer


def test_short_prompts_together_lengthen_an_iteration_by_a_tenth_of_a_second_at_most() -> None:
    assert Pacer(1.5, 256).short_allowance(16) == 256, "nothing is known yet"
    assert paced(1e-3, 0.010).short_allowance(16) in range(int(SHORT_S * 990), int(SHORT_S * 1000) + 1)
    assert paced(1e-5, 0.010).short_allowance(16) == 2048, "a fast processor is not held back"
    assert paced(1.0, 0.010).short_allowance(16) == FIRST_CHUNK, "a prompt always gets on"
    unbound = Pacer(0.0, 2048)
    unbound.observe(16, 0, 0.010)
    unbound.observe(16, 100, 1.0)
    assert unbound.short_allowance(16) == 2048


def test_where_decoding_is_slow_the_weights_are_not_read_for_a_few_tokens() -> None:
    decode_s = 0.060
    allowed = paced(1e-3, decode_s).short_allowance(16)
    assert allowed in range(int(SHORT_ITERATIONS * 59), int(SHORT_ITERATIONS * 60) + 1)


def test_short_prompts_get_on_as_fast_as_they_come() -> None:
    pacer = paced(1e-3, 0.010)
    for _ in range(10 * LATELY // 32):
        pacer.composed(32, 160)
    assert SHORT_HEADROOM * 155 <= pacer.short_allowance(32) <= SHORT_HEADROOM * 170
    assert pacer.short_allowance(4) < 110, "few that decode keep no more of them coming"
    for _ in range(10 * LATELY // 32):
        pacer.composed(32, 0)
    assert pacer.short_allowance(32) < 110


def test_what_came_while_nobody_decoded_is_soon_forgotten() -> None:
    pacer = paced(1e-3, 0.010)
    for _ in range(1_000_000):
        pacer.composed(0, 2048)
    for _ in range(10 * LATELY):
        pacer.composed(1, 0)
    assert pacer.short_allowance(1) < 110


def test_what_more_decodes_cost_is_not_taken_for_a_prompts_price() -> None:
    """A long prompt that never leaves a decode alone crept on by the least chunk for ever."""
    pacer = paced(1e-4, 0.010)
    for _ in range(8 * ALONE_EVERY):
        chunk = pacer.allowance(1)
        pacer.composed(32, 0)
        pacer.observe(32, chunk, 0.060 + chunk * 1e-4)
    assert pacer.allowance(1) in range(270, 310), "half of 60 ms at 0.1 ms a token"


def test_prompts_wait_for_one_iteration_in_many_whatever_is_measured() -> None:
    pacer = Pacer(1.5, 2048)
    allowed = []
    for _ in range(10 * (ALONE_EVERY + 1)):
        allowed.append((pacer.allowance(1), pacer.short_allowance(4)))
        pacer.composed(4, 1)
        pacer.observe(4, 1, 1.0)
    assert allowed.count((0, 0)) == 10 and all(
        long > 0 and short > 0 for long, short in allowed if (long, short) != (0, 0)
    )


def test_prompts_of_one_token_do_not_keep_decodes_from_being_measured() -> None:
    engine = RecordingEngine(tokens_per_iteration=256)

    def clock() -> float:
        return sum(0.010 if count == 1 else 0.0001 * count for parts in engine.iterations for _, _, count in parts)

    loop = IterationLoop(engine, clock=clock, decode_slowdown=1.5)
    loop.admit(admission(1, [5, 6, 7], range(20), max_tokens=200))
    loop.admit(admission(2, [7] * 1500, range(20, 120), max_tokens=1))
    for number in range(3, 3 + ALONE_EVERY + 10):
        loop.admit(admission(number, [5], [120], max_tokens=1))
        loop.step()
    beside_decodes = [count for parts in engine.iterations[1:] for sequence, _, count in parts if sequence == 2]
    assert max(beside_decodes) in range(95, 101), "half of two times 10 ms at 0.1 ms a token"


def test_short_prompts_share_what_they_may_beside_decodes_and_long_ones_keep_their_own() -> None:
    engine = RecordingEngine(tokens_per_iteration=256)

    def clock() -> float:
        """A prompt's token takes 2 ms, an iteration of decodes 4."""
        return sum(0.002 * count if count > 1 else 0.004 for parts in engine.iterations for _, _, count in parts)

    loop = IterationLoop(engine, clock=clock, decode_slowdown=1.5)
    loop.admit(admission(1, [5, 6, 7], range(4), max_tokens=40))
    for _ in range(4):
        loop.step()
    loop.admit(admission(2, [7] * 40, range(4, 8), max_tokens=1))
    loop.step()
    loop.admit(admission(3, [7] * 100, range(8, 16), max_tokens=1))
    loop.admit(admission(4, [6] * 30, range(16, 19), max_tokens=1))
    loop.admit(admission(5, [8] * 1500, range(20, 120), max_tokens=1))
    loop.step()
    chunks = {sequence: num_tokens for sequence, _, num_tokens in engine.iterations[-1]}
    assert chunks == {1: 1, 3: 50, 5: FIRST_CHUNK}, "a tenth of a second for the short ones"
    loop.step()
    chunks = {sequence: num_tokens for sequence, _, num_tokens in engine.iterations[-1]}
    assert chunks == {1: 1, 3: 50, 5: FIRST_CHUNK}
    loop.step()
    chunks = {sequence: num_tokens for sequence, _, num_tokens in engine.iterations[-1]}
    assert chunks == {1: 1, 4: 30, 5: FIRST_CHUNK}
    assert run_until_idle(loop).finish.keys() == {1, 5}


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
