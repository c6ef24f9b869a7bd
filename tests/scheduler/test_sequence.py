from itertools import product

import pytest

from headrace_scheduler.fairness import Shares
from headrace_scheduler.prefix_index import extend_chain, root_hash
from headrace_scheduler.sequence import TRANSITIONS, OwnedRequest, Sequence, SequenceState
from headrace_shared.codec import pack_ids
from headrace_shared.messages import Outcome
from tests.scheduler.builders import request


def owned(prompt: int = 10, num_choices: int = 1) -> OwnedRequest:
    return OwnedRequest(request(prompt=prompt, num_choices=num_choices), "ack", 5, 1, 0, Shares().open(request()))


def sequence_in(state: SequenceState) -> Sequence:
    return Sequence(owned(), 0, state, 0)


@pytest.mark.parametrize(("old", "new"), list(product(SequenceState, SequenceState)))
def test_a_move_is_made_if_the_table_has_it_and_else_changes_nothing(old: SequenceState, new: SequenceState) -> None:
    sequence = sequence_in(old)
    if new in TRANSITIONS[old]:
        sequence.to(new)
        assert sequence.state is new
    else:
        with pytest.raises(AssertionError, match=str(new)):
            sequence.to(new)
        assert sequence.state is old


def test_an_ended_sequence_stays_ended() -> None:
    assert not TRANSITIONS[SequenceState.ENDED]
    assert TRANSITIONS.keys() == set(SequenceState)


def test_packed_ids_cross_from_prompt_to_output() -> None:
    sequence = sequence_in(SequenceState.RUNNING)
    sequence.output.extend([1, 2, 3])
    assert sequence.packed(8, 12) == pack_ids([108, 109, 1, 2])
    assert sequence.packed(0, 2) == pack_ids([100, 101])
    assert sequence.packed(11, 13) == pack_ids([2, 3])


def test_the_chain_of_known_tokens_is_that_of_one_long_prompt() -> None:
    sequence = sequence_in(SequenceState.WAITING)
    sequence.output.extend([1, 2, 3, 4, 5, 6, 7])
    whole = pack_ids([*range(100, 110), 1, 2, 3, 4, 5, 6, 7])
    assert sequence.chain(4) == extend_chain(root_hash("m", "", 4), whole, 4)
    assert len(sequence.chain(4)) == 4


def test_the_prompts_chain_is_computed_once() -> None:
    request = owned(num_choices=2)
    assert request.sequences[0].chain(4) is request.sequences[1].chain(4)


def test_the_last_token_needs_no_keys_and_values() -> None:
    assert owned(prompt=10).num_positions == 29


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        ((Outcome.FINISHED, Outcome.FINISHED), Outcome.FINISHED),
        ((Outcome.FINISHED, Outcome.CANCELLED), Outcome.CANCELLED),
        ((Outcome.CANCELLED, Outcome.EXPIRED), Outcome.EXPIRED),
        ((Outcome.FAILED, Outcome.EXPIRED), Outcome.FAILED),
    ],
)
def test_a_request_ends_as_its_worst_choice(outcomes: tuple[Outcome, ...], whole: Outcome) -> None:
    request = owned(num_choices=2)
    for sequence, outcome in zip(request.sequences, outcomes, strict=True):
        sequence.outcome = outcome
    assert request.outcome() is whole


def test_the_next_attempt_is_above_every_known_one() -> None:
    sequence = Sequence(owned(), 0, SequenceState.WAITING, 256)
    sequence.begin_attempt(3)
    assert (sequence.last_attempt, sequence.next_attempt) == (3, 256)
    sequence.begin_attempt(256)
    assert sequence.next_attempt == 257
