"""What sequences share: cached prefixes, the prompt among choices of one request, and across workers."""

import pytest

from headrace_scheduler.decisions import SchedulerConfig
from headrace_scheduler.scheduler import Scheduler
from headrace_shared.messages import CancelReason, FinishReason, Outcome, RequestId
from tests.scheduler.builders import (
    NOW,
    W1,
    W2,
    add,
    admissions,
    admitted_names,
    advance,
    facts,
    report,
    request,
    scheduler,
    step,
)

R1 = RequestId("r1")


def run_once(made: Scheduler, name: str, prompt: int = 40, **of_request: object) -> None:
    """A request that computes its prompt, says one token and is gone."""
    add(made, request(name, prompt=prompt, max_tokens=1, **of_request))  # type: ignore[arg-type]  # test sugar
    [admission] = admissions(step(made))
    advance(made, admission.sequence_id, prompt, 1, finish=FinishReason.STOP, released=True)
    step(made)


def cached_of_next(made: Scheduler, **of_request: object) -> int:
    add(made, request("next", **of_request))  # type: ignore[arg-type]  # test sugar
    [admission] = admissions(step(made))
    return admission.num_cached


def test_full_blocks_of_an_earlier_prompt_are_shared() -> None:
    made = scheduler(facts())
    run_once(made, "first", 40)
    assert cached_of_next(made, prompt=50) == 32


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(31, 16), (32, 16), (33, 32)])
def test_at_least_one_token_is_left_to_compute(num_prompt: int, num_cached: int) -> None:
    made = scheduler(facts())
    run_once(made, "first", 40)
    assert cached_of_next(made, prompt=num_prompt) == num_cached


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    made = scheduler(facts())
    add(made, request("first", prompt=40, max_tokens=30))
    step(made)
    advance(made, 1, 40, 1)
    advance(made, 1, 63, *range(2, 25))
    advance(made, 1, 64, 25, finish=FinishReason.STOP, released=True)
    conversation = [*range(100, 140), *range(1, 26), 7, 7, 7]
    assert cached_of_next(made, prompt=conversation) == 64


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_anew_and_then_shared() -> None:
    made = scheduler(facts())
    run_once(made, "first", 40)
    assert cached_of_next(made, prompt=50, num_choices=2, num_prompt_logprobs=1) == 0
    advance(made, 2, 50, 1)
    [second] = admissions(step(made))
    assert (second.choice, second.num_cached) == (1, 49), "choice 0 tells them for all"


def test_other_salts_share_nothing() -> None:
    made = scheduler(facts())
    run_once(made, "first", salt="tenant-a")
    assert cached_of_next(made, salt="tenant-b") == 0


def test_caching_can_be_turned_off() -> None:
    made = scheduler(facts(), config=SchedulerConfig(prefix_caching=False))
    run_once(made, "first")
    assert cached_of_next(made) == 0


def test_a_block_is_visible_only_once_it_is_computed() -> None:
    made = scheduler(facts(num_blocks=256))
    add(made, *(request(f"r-{i}", prompt=[*range(200), 1000 + i], max_tokens=4) for i in range(16)))
    first = admissions(step(made))
    assert [admission.num_cached for admission in first] == [0] * 16
    tables = [block_id for admission in first for block_id in admission.block_ids]
    assert len(tables) == len(set(tables))
    advance(made, 1, 100)
    add(made, request("late", prompt=[*range(200), 5]))
    made.cancel(RequestId("r-15"), None, CancelReason.CLIENT, NOW)
    [late] = admissions(step(made))
    assert late.num_cached == 96
    assert late.block_ids[:6] == first[0].block_ids[:6]


def test_a_released_but_unconfirmed_prefix_can_be_shared() -> None:
    made = scheduler(facts(num_blocks=8))
    add(made, request("first", prompt=100, max_tokens=2))
    step(made)
    advance(made, 1, 100, 1, finish=FinishReason.STOP)
    step(made)
    assert cached_of_next(made, prompt=97, max_tokens=2) == 96
    report(made, released=(1,))
    assert made.gauges().workers[W1].num_referenced == 7


def test_the_worker_with_the_longest_prefix_is_chosen_until_load_outweighs_it() -> None:
    made = scheduler(facts(num_blocks=256), facts(num_blocks=256))
    prefix = list(range(160))
    add(made, request("first", prompt=prefix, max_tokens=2))
    step(made)
    advance(made, 1, 160, 1)
    add(made, request("like", prompt=[*prefix, 7, 8], max_tokens=2))
    decisions = step(made)
    assert admitted_names(decisions, W1) == ["like"]
    assert admissions(decisions, W1)[0].num_cached == 160
    add(made, request("other", prompt=range(1000, 1500), max_tokens=2))
    assert admitted_names(step(made), W2) == ["other"]
    add(made, request("big", prompt=range(2000, 2300), max_tokens=2))
    assert admitted_names(step(made), W1) == ["big"]
    add(made, request("again", prompt=[*prefix, 9, 9], max_tokens=2))
    assert admitted_names(step(made), W1) == ["again"]
    add(made, request("loaded", prompt=range(3000, 3900), max_tokens=2))
    assert admitted_names(step(made), W1) == ["loaded"]
    add(made, request("elsewhere", prompt=[*prefix, 5, 5], max_tokens=2))
    assert admitted_names(step(made), W2) == ["elsewhere"]


# Several choices of one prompt.


def test_choices_wait_for_the_first_to_compute_the_prompt_and_share_it() -> None:
    made = scheduler(facts())
    add(made, request(prompt=37, num_choices=3))
    [first] = admissions(step(made))
    advance(made, 1, 30)
    assert step(made).credits == {}
    advance(made, 1, 37, 5)
    second, third = admissions(step(made))
    assert (second.choice, third.choice) == (1, 2)
    for admission in (second, third):
        assert admission.num_cached == 36
        assert admission.block_ids[:2] == first.block_ids[:2]
        assert admission.copies == ((first.block_ids[2], admission.block_ids[2]),)
    assert len({first.block_ids[2], second.block_ids[2], third.block_ids[2]}) == 3


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "num_shared", "copies_block"),
    [(1, 0, 0, False), (16, 15, 0, True), (17, 16, 1, False), (32, 31, 1, True), (33, 32, 2, False)],
)
def test_the_last_prompt_token_is_computed_in_a_block_of_ones_own(
    num_prompt: int, num_cached: int, num_shared: int, copies_block: bool
) -> None:
    made = scheduler(facts())
    add(made, request(prompt=num_prompt, num_choices=2))
    [first] = admissions(step(made))
    advance(made, 1, num_prompt, 5)
    [second] = admissions(step(made))
    assert second.num_cached == num_cached
    shared = set(first.block_ids) & set(second.block_ids)
    assert shared == set(first.block_ids[:num_shared])
    assert bool(second.copies) == copies_block


def test_choices_share_the_prompt_with_the_prefix_cache_off_too() -> None:
    made = scheduler(facts(), config=SchedulerConfig(prefix_caching=False))
    add(made, request(prompt=37, num_choices=2))
    step(made)
    advance(made, 1, 37, 5)
    assert [admission.num_cached for admission in admissions(step(made))] == [36]


def test_the_end_of_one_choice_leaves_the_others_their_blocks() -> None:
    made = scheduler(facts())
    add(made, request(prompt=37, num_choices=3))
    step(made)
    advance(made, 1, 37, 5)
    step(made)
    advance(made, 1, 38, 6, finish=FinishReason.STOP, released=True)
    assert step(made).ended == []
    made.cancel(R1, 1, CancelReason.STOP, NOW)
    assert step(made).credits[W1].releases == [2]
    report(made, released=(2,))
    advance(made, 3, 37, 5, finish=FinishReason.LENGTH, released=True)
    [ended] = step(made).ended
    assert ended.event.outcome is Outcome.FINISHED
    assert made.gauges().workers[W1].num_free == 64


@pytest.mark.parametrize("how", ["finished", "cancelled", "lost", "cancelled while waiting"])
def test_the_others_get_going_whatever_becomes_of_the_first(how: str) -> None:
    made = scheduler(facts())
    add(made, request(prompt=37, num_choices=3, max_tokens=20))
    if how == "cancelled while waiting":
        made.cancel(R1, 0, CancelReason.STOP, NOW)
        [admission] = admissions(step(made))
        assert admission.choice == 1
        return
    step(made)
    if how == "finished":
        advance(made, 1, 37, 5, finish=FinishReason.STOP, released=True)
    elif how == "cancelled":
        advance(made, 1, 20)
        made.cancel(R1, 0, CancelReason.STOP, NOW)
    else:
        made.worker_lost(W1, NOW)
        made.add_worker(W1, facts(), (), NOW)
    [admission] = admissions(step(made))
    assert admission.choice == (0 if how == "lost" else 1)
    sequence_id = admission.sequence_id
    advance(made, sequence_id, 37, 5)
    rest = admissions(step(made))
    assert [other.choice for other in rest] == ([1, 2] if how == "lost" else [2])
    assert all(other.num_cached == 36 for other in rest)


def test_cancelling_all_choices_ends_the_request_once() -> None:
    made = scheduler(facts())
    add(made, request(num_choices=4))
    step(made)
    made.cancel(R1, None, CancelReason.CLIENT, NOW)
    decisions = step(made)
    assert len(decisions.ended) == 1
    assert decisions.credits[W1].releases == [1]
    assert decisions.credits[W1].admissions == []
