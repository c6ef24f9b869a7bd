"""Sequences with a grammar in the iteration loop: they wait for their grammar, and nobody waits for them."""

from collections.abc import Sequence

import msgspec
import pytest

from headrace_shared.messages import Admission, SequenceId
from headrace_worker.iteration import SequenceSlice
from headrace_worker.loop import IterationLoop
from tests.scripted_engine import ScriptedEngine, expected_output
from tests.worker.loop_builders import admission, run_until_idle

PROMPT = list(range(100, 110))


class CompilingEngine(ScriptedEngine):
    """Grammars get ready when they are waited for, or when the test says so."""

    def __init__(self, *, looks_ahead: bool) -> None:
        super().__init__(looks_ahead=looks_ahead)
        self.ready: set[SequenceId] = set()
        self.num_waits = 0
        self.num_waits_needed = 1
        self.submitted: list[list[tuple[int, bool]]] = []

    def is_ready(self, sequence_id: SequenceId, *, wait: bool) -> bool:
        if wait:
            self.num_waits += 1
            if self.num_waits >= self.num_waits_needed:
                self.ready.add(sequence_id)
        return sequence_id in self.ready

    def submit(self, slices: Sequence[SequenceSlice]) -> None:
        self.submitted.append([(part.sequence_id, part.token_ids is None) for part in slices])
        super().submit(slices)


def with_grammar(given: Admission) -> Admission:
    sampling = msgspec.structs.replace(given.request.sampling, grammar="start: /a*/")
    return msgspec.structs.replace(given, request=msgspec.structs.replace(given.request, sampling=sampling))


@pytest.fixture(params=[False, True], ids=["one-at-a-time", "looks-ahead"])
def engine(request: pytest.FixtureRequest) -> CompilingEngine:
    return CompilingEngine(looks_ahead=bool(request.param))


def test_others_run_while_a_grammar_is_compiled(engine: CompilingEngine) -> None:
    loop = IterationLoop(engine)
    loop.admit(with_grammar(admission(1, PROMPT, [0, 1], max_tokens=4)))
    loop.admit(admission(2, PROMPT, [2, 3], max_tokens=9, seed=5))
    for _ in range(3):
        assert loop.step() is not None
    assert engine.num_waits == 0
    assert {sequence for slices in engine.submitted for sequence, _ in slices} == {2}
    engine.ready.add(SequenceId(1))
    collected = run_until_idle(loop)
    assert collected.tokens[1] == expected_output(PROMPT, 0, 0, 4)
    assert len(engine.submitted) <= 13 and loop.num_sequences == 0


def test_with_nothing_else_to_do_the_loop_waits_for_the_grammar(engine: CompilingEngine) -> None:
    loop = IterationLoop(engine)
    loop.admit(with_grammar(admission(1, PROMPT, [0, 1], max_tokens=4)))
    assert run_until_idle(loop).tokens[1] == expected_output(PROMPT, 0, 0, 4)
    assert engine.num_waits == 1


def test_whoever_comes_while_it_waits_is_not_held_up(engine: CompilingEngine) -> None:
    engine.num_waits_needed = 1000
    loop = IterationLoop(engine)
    loop.admit(with_grammar(admission(1, PROMPT, [0, 1], max_tokens=4)))
    for _ in range(3):
        result = loop.step()
        assert result is not None and not result.sequences, "the loop looks again before long"
    loop.admit(admission(2, PROMPT, [2, 3], max_tokens=2, seed=5))
    result = loop.step()
    assert result is not None and [row.sequence_id for row in result.sequences] == [2]
    assert engine.num_waits == 3


def test_a_released_sequence_is_not_waited_for(engine: CompilingEngine) -> None:
    loop = IterationLoop(engine)
    loop.admit(with_grammar(admission(1, PROMPT, [0, 1], max_tokens=4)))
    loop.release(SequenceId(1))
    assert run_until_idle(loop).released == [1]
    assert engine.num_waits == 0


def test_its_next_token_is_never_sampled_ahead_of_the_one_before(engine: CompilingEngine) -> None:
    loop = IterationLoop(engine)
    engine.ready.add(SequenceId(1))
    loop.admit(with_grammar(admission(1, PROMPT, [0, 1], max_tokens=6)))
    loop.admit(admission(2, PROMPT, [2, 3], max_tokens=6, seed=5))
    collected = run_until_idle(loop)
    assert collected.tokens == {1: expected_output(PROMPT, 0, 0, 6), 2: expected_output(PROMPT, 5, 0, 6)}
    ahead = {sequence for slices in engine.submitted for sequence, is_ahead in slices if is_ahead}
    assert ahead == ({2} if engine.looks_ahead else set())
