"""What a successor learns from the token log."""

from headrace_scheduler.decisions import ChoiceLog
from headrace_scheduler.token_log import RequestLog, parse_log
from headrace_shared import codec
from headrace_shared.messages import FinishReason, Outcome, RequestEnded, RequestId, TokenFrame

REQUEST = RequestId("a" * 32)


def frame(index: int, *tokens: int, choice: int = 0, attempt: int = 0, finish: FinishReason | None = None) -> bytes:
    return codec.encode(
        TokenFrame(request_id=REQUEST, choice=choice, attempt=attempt, index=index, tokens=tokens, finish=finish)
    )


def test_an_empty_log_knows_nothing() -> None:
    assert parse_log([]) == RequestLog({}, False)


def test_frames_are_put_together_by_choice() -> None:
    log = parse_log([frame(0, 5), frame(0, 8, choice=1), frame(1, 6, 7), frame(1, 9, choice=1, attempt=2)])
    assert (log.choices[0].output, log.choices[0].attempt) == ((5, 6, 7), 0)
    assert (log.choices[1].output, log.choices[1].attempt) == ((8, 9), 2)


def test_repeated_and_overlapping_frames_count_once() -> None:
    log = parse_log([frame(0, 5, 6), frame(0, 5, 6, 7, attempt=1), frame(2, 7, 8, attempt=1)])
    assert log.choices[0].output == (5, 6, 7, 8) and log.choices[0].attempt == 1


def test_only_what_follows_the_beginning_without_a_gap_counts() -> None:
    log = parse_log([frame(0, 5), frame(2, 7, finish=FinishReason.STOP)])
    assert log.choices[0].output == (5,) and log.choices[0].finish is None
    log = parse_log([frame(3, 7, attempt=4)])
    assert log.choices[0].output == () and log.choices[0].attempt == 4


def test_a_tail_is_put_behind_what_is_known() -> None:
    known = {0: ChoiceLog([5, 6], 2), 1: ChoiceLog([8], 0)}
    log = parse_log([frame(1, 6, attempt=2), frame(2, 7, attempt=2, finish=FinishReason.STOP)], known=known)
    assert log.choices == {0: ((5, 6, 7), 2, FinishReason.STOP)} and not log.is_unsure
    log = parse_log([frame(3, 7, attempt=2), frame(1, 9, choice=1)], known=known)
    assert log.is_unsure and log.choices[1].output == (8, 9)


def test_a_tail_of_an_earlier_attempt_than_the_known_one_tells_nothing_for_sure() -> None:
    """Perhaps its tokens came before those of the later one, and routers have them; perhaps they passed it over."""
    known = {0: ChoiceLog([5, 6], 2)}
    for tail in (frame(2, 7, attempt=1), frame(2, attempt=1, finish=FinishReason.STOP)):
        log = parse_log([tail], known=known)
        assert log.is_unsure and log.choices[0] == ((5, 6), 1, None)
    assert not parse_log([frame(0, 5, 6, attempt=1)], known=known).is_unsure


def test_an_attempt_that_routers_listen_to_no_more_tells_nothing() -> None:
    told = [frame(0, 5), frame(1, 6, attempt=1), frame(1, 6), frame(2, 7), frame(3, 8, finish=FinishReason.STOP)]
    assert parse_log(told).choices[0] == ((5, 6), 1, None)
    log = parse_log([*told, frame(2, 9, attempt=1, finish=FinishReason.LENGTH)])
    assert log.choices[0] == ((5, 6, 9), 1, FinishReason.LENGTH)


def test_routers_listen_to_an_earlier_attempt_while_it_is_ahead() -> None:
    told = [frame(0, 5, 6), frame(1, 6, attempt=1), frame(2, 7), frame(2, 7, attempt=1)]
    assert parse_log(told).choices[0] == ((5, 6, 7), 1, None)
    log = parse_log([*told, frame(3, 8, finish=FinishReason.STOP), frame(3, 9, attempt=1)])
    assert log.choices[0] == ((5, 6, 7, 8), 1, FinishReason.STOP)


def test_what_was_passed_over_counts_where_a_later_attempt_goes_on_behind_it() -> None:
    """Its scheduler had adopted the earlier one with its tokens; routers look them up in the log."""
    told = [frame(0, 5), frame(1, 6, attempt=1), frame(1, 6), frame(2, 7), frame(3, 8)]
    log = parse_log([*told, frame(4, 9, attempt=2)])
    assert log.choices[0] == ((5, 6, 7, 8, 9), 2, None)


def test_a_finish_at_the_end_is_known() -> None:
    log = parse_log([frame(0, 5), frame(1, 6, finish=FinishReason.LENGTH)])
    assert log.choices[0].finish is FinishReason.LENGTH and not log.has_ended


def test_the_terminal_event_is_found_and_rubbish_is_passed_over() -> None:
    ended = RequestEnded(request_id=REQUEST, outcome=Outcome.FINISHED)
    log = parse_log([b"\xc1", frame(0, 5), codec.encode(ended)])
    assert log.has_ended and log.choices[0].output == (5,)


def test_an_output_counts_only_behind_the_whole_of_the_prompts_log_probabilities() -> None:
    """Whoever goes on from an output tells nothing of the prompt again."""
    told = [frame(-3, 11, 12), frame(-1, 13), frame(0, 5), frame(0, 8, choice=1)]
    log = parse_log(told, first=-3)
    assert log.choices[0].output == (5,) and log.choices[1].output == (8,)
    for lost in range(2):
        log = parse_log(told[:lost] + told[lost + 1 :], first=-3)
        assert log.choices[0].output == () and log.choices[1].output == (8,)
    again = [frame(-3, 11, attempt=1), frame(-2, 12, 13, attempt=1), frame(0, 5, 6, attempt=1)]
    assert parse_log([*told[1:], *again], first=-3).choices[0] == ((5, 6), 1, None)
