"""The I/O process's picture of the engine's sequences."""

from collections.abc import Sequence

from headrace_shared import codec
from headrace_shared.messages import (
    Admission,
    BlockId,
    Extension,
    FinishReason,
    Grant,
    SequenceId,
    TokenFrame,
    TokenLogprobs,
    WorkerId,
)
from headrace_worker.iteration import SequenceResult
from headrace_worker.mirror import KEPT_LOOKS, MAX_KEPT, Mirror
from tests.worker.loop_builders import admission

PROMPT = [7, 8, 9]
BIG = 1 << 20


def grant(
    number: int,
    *admissions: Admission,
    extensions: Sequence[Extension] = (),
    progress_seen: int = 0,
) -> Grant:
    return Grant(
        worker=WorkerId("w"),
        epoch=1,
        number=number,
        progress_seen=progress_seen,
        admissions=tuple(admissions),
        extensions=tuple(extensions),
    )


def row(
    sequence_id: int, num_computed: int, token: int | None = None, finish: FinishReason | None = None
) -> SequenceResult:
    return SequenceResult(SequenceId(sequence_id), num_computed, token, finish)


def frames(mirror: Mirror) -> list[TokenFrame]:
    """Takes and marks everything that is to be published."""
    taken = []
    for sequence in mirror.unpublished():
        complete = False
        while not complete:
            frame = sequence.next_frame()
            taken.append(frame)
            complete = mirror.mark_published(sequence, frame)
    return taken


def report(mirror: Mirror, number: int) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[int]]:
    rows, released = mirror.report(BIG)
    mirror.mark_reported(rows, released, number)
    return [(int(r.sequence_id), r.num_computed, r.tokens) for r in rows], [int(key) for key in released]


def test_frames_continue_the_output_of_earlier_attempts() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1], output=[50, 51], num_cached=2)))
    mirror.apply_rows([row(1, 5, 52)], [])
    (frame,) = frames(mirror)
    assert (frame.index, frame.tokens, frame.finish, frame.num_cached) == (2, (52,), None, 2)
    mirror.apply_rows([row(1, 6, 53, FinishReason.LENGTH)], [])
    (frame,) = frames(mirror)
    assert (frame.index, frame.tokens, frame.finish) == (3, (53,), FinishReason.LENGTH)
    assert frames(mirror) == []


def test_what_could_not_be_sent_goes_out_with_the_next_tokens() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1])))
    mirror.apply_rows([row(1, 3, 60)], [])
    mirror.apply_rows([row(1, 4, 61)], [])
    (frame,) = frames(mirror)
    assert (frame.index, frame.tokens) == (0, (60, 61))
    assert report(mirror, 1) == ([(1, 4, (60, 61))], [])
    assert report(mirror, 2) == ([], [])


def test_whoever_waits_for_a_first_token_is_served_before_those_who_have_begun() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1]), admission(2, PROMPT, [2, 3])))
    mirror.apply_rows([row(1, 3, 60), row(2, 3, 70)], [])
    assert [frame.index for frame in frames(mirror)] == [0, 0]
    mirror.apply_grant(grant(2, admission(3, PROMPT, [4, 5]), admission(4, PROMPT, [6, 7])))
    mirror.apply_rows([row(1, 4, 61), row(2, 4, 71), row(3, 3, 80), row(4, 3, 90)], [])
    assert [(frame.index, *frame.tokens) for frame in frames(mirror)] == [(0, 80), (0, 90), (1, 61), (1, 71)]
    mirror.apply_rows([row(1, 5, 62), row(2, 5, 72), row(3, 4, 81), row(4, 4, 91)], [])
    assert [frame.tokens for frame in frames(mirror)] == [(62,), (72,), (81,), (91,)]


def test_everything_is_published_again_after_a_broken_connection() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1], output=[50])))
    mirror.apply_rows([row(1, 4, 60)], [])
    mirror.apply_rows([row(1, 5, 61, FinishReason.LENGTH)], [SequenceId(1)])
    frames(mirror)
    mirror.publish_again()
    (frame,) = frames(mirror)
    assert (frame.index, frame.tokens, frame.finish) == (1, (60, 61), FinishReason.LENGTH)


def test_what_is_over_can_be_published_again_for_a_while() -> None:
    mirror = Mirror(4, keeps_finished=True)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1])))
    mirror.apply_rows([row(1, 3, 60, FinishReason.LENGTH)], [SequenceId(1)])
    frames(mirror)
    report(mirror, 4)
    mirror.apply_grant(grant(2, progress_seen=4))
    assert mirror.snapshot(BIG) == [()], "the scheduler knows that it is over"
    for _ in range(KEPT_LOOKS):
        mirror.on_log_seen()
    for _ in range(2):
        mirror.publish_again()
        (frame,) = frames(mirror)
        assert (frame.index, frame.tokens, frame.finish) == (0, (60,), FinishReason.LENGTH)
    mirror.on_log_seen()
    mirror.publish_again()
    assert frames(mirror) == []


def test_only_so_much_that_is_over_is_kept() -> None:
    mirror = Mirror(4, keeps_finished=True)
    for number in range(1, MAX_KEPT + 11):
        mirror.apply_grant(grant(2 * number, admission(number, PROMPT, [0, 1]), progress_seen=number - 1))
        mirror.apply_rows([row(number, 3, 60, FinishReason.LENGTH)], [SequenceId(number)])
        frames(mirror)
        report(mirror, number)
    mirror.apply_grant(grant(1, progress_seen=MAX_KEPT + 11))
    mirror.publish_again()
    assert len(frames(mirror)) == MAX_KEPT


def test_long_tails_are_published_in_several_frames_with_the_finish_on_the_last() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0], num_logprobs=0)))
    for number in range(1100):
        finish = FinishReason.LENGTH if number == 1099 else None
        mirror.apply_rows(
            [SequenceResult(SequenceId(1), 3 + number, 5, finish, None, TokenLogprobs(-float(number), ()))], []
        )
    taken = frames(mirror)
    assert [frame.index for frame in taken] == [0, 512, 1024]
    assert [frame.finish for frame in taken] == [None, None, FinishReason.LENGTH]
    assert [entry.logprob for frame in taken for entry in frame.logprobs] == [-float(n) for n in range(1100)]


def test_the_prompts_log_probabilities_come_first_and_are_numbered_backwards() -> None:
    mirror = Mirror(4)
    prompt = list(range(700))
    mirror.apply_grant(grant(1, admission(1, prompt, range(180), num_prompt_logprobs=0)))
    scores = tuple(TokenLogprobs(-float(n), (), n) for n in range(1, 700))
    mirror.apply_rows([SequenceResult(SequenceId(1), 600, scores=scores[:600])], [])
    first = frames(mirror)
    assert [(frame.index, len(frame.tokens)) for frame in first] == [(-699, 512), (-187, 88)]
    last = SequenceResult(SequenceId(1), 700, 60, FinishReason.LENGTH, scores=scores[600:])
    mirror.apply_rows([last], [])
    rest = frames(mirror)
    assert [(frame.index, frame.finish) for frame in rest] == [(-99, None), (0, FinishReason.LENGTH)]
    told = [*first, *rest[:1]]
    assert [token for frame in told for token in frame.tokens] == prompt[1:]
    assert tuple(entry for frame in told for entry in frame.logprobs) == scores
    (entry,) = mirror.snapshot(BIG)[0]
    assert codec.unpack_ids(entry.tokens).tolist() == [60], "the prompt is no output"
    mirror.publish_again()
    assert [frame.index for frame in frames(mirror)] == [-699, -187, 0]


def test_a_released_sequence_is_kept_until_the_scheduler_has_seen_it() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1])))
    mirror.apply_rows([row(1, 3, 60, FinishReason.LENGTH)], [SequenceId(1)])
    frames(mirror)
    assert mirror.num_sequences == 0 and mirror.num_blocks_held == 0
    assert report(mirror, 4) == ([(1, 3, (60,))], [1])
    mirror.apply_grant(grant(2, progress_seen=3))
    assert len(mirror.snapshot(BIG)[0]) == 1
    mirror.apply_grant(grant(1, progress_seen=0))
    assert mirror.snapshot(BIG) == [()]


def test_a_finished_sequence_that_holds_its_blocks_stays() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1])))
    mirror.apply_rows([row(1, 3, 60, FinishReason.STOP)], [])
    report(mirror, 1)
    mirror.apply_grant(grant(2, progress_seen=1))
    (entry,) = mirror.snapshot(BIG)[0]
    assert (entry.finish, entry.released) == (FinishReason.STOP, False)
    assert codec.unpack_ids(entry.tokens).tolist() == [60]


def test_the_snapshot_holds_the_block_table_of_now_and_counts_as_a_report() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0], copies=((5, 0),))))
    mirror.apply_grant(grant(2, extensions=[Extension(SequenceId(1), (BlockId(3), BlockId(9)))]))
    mirror.apply_rows([row(1, 3, 60)], [])
    (entry,) = mirror.snapshot(BIG)[0]
    assert entry.admission.block_ids == (0, 3, 9) and entry.admission.copies == ()
    assert entry.num_computed == 3
    assert not mirror.has_report
    mirror.apply_rows([row(1, 4, 61)], [])
    assert report(mirror, 1) == ([(1, 4, (61,))], [])


def test_snapshots_are_split_and_each_part_fits() -> None:
    mirror = Mirror(4)
    for number in range(1, 21):
        mirror.apply_grant(grant(number, admission(number, list(range(200)), [number])))
    parts = mirror.snapshot(4000)
    assert len(parts) > 5
    assert [int(entry.admission.sequence_id) for part in parts for entry in part] == list(range(1, 21))
    assert all(sum(len(codec.encode(entry)) for entry in part) <= 4000 for part in parts)


def test_a_sequence_that_no_message_can_hold_is_dropped() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0]), admission(2, list(range(1000)), [1])))
    assert mirror.drop_larger_than(3000) == [SequenceId(2)]
    assert [int(entry.admission.sequence_id) for entry in mirror.snapshot(3000)[0]] == [1]


def test_reports_are_split_by_size() -> None:
    mirror = Mirror(4)
    for number in range(1, 11):
        mirror.apply_grant(grant(number, admission(number, PROMPT, [number])))
        for _ in range(50):
            mirror.apply_rows([row(number, 3, 60)], [])
        mirror.apply_rows([], [SequenceId(number)])
    seen: list[int] = []
    released: list[int] = []
    for progress in range(1, 20):
        rows, part = mirror.report(700)
        mirror.mark_reported(rows, part, progress)
        seen += [int(r.sequence_id) for r in rows]
        released += [int(key) for key in part]
    assert seen == released == list(range(1, 11))


def test_rows_of_unknown_sequences_mean_nothing() -> None:
    mirror = Mirror(4)
    assert mirror.apply_rows([row(3, 3, 60)], [SequenceId(3)]) == 0
    assert not mirror.has_report and mirror.unpublished() == []


def test_urgent_is_what_somebody_waits_for() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0, 1])))
    mirror.apply_rows([row(1, 2)], [])
    assert mirror.has_report and not mirror.is_report_urgent
    mirror.apply_rows([row(1, 3, 60)], [])
    assert mirror.is_report_urgent
    report(mirror, 1)
    mirror.apply_rows([row(1, 4, 61)], [])
    assert not mirror.is_report_urgent
    mirror.apply_rows([], [SequenceId(1)])
    assert mirror.is_report_urgent


def test_running_and_stalled_sequences_are_told_apart() -> None:
    mirror = Mirror(4)
    mirror.apply_grant(grant(1, admission(1, PROMPT, [0])))
    assert mirror.can_run and mirror.num_stalled == 0
    mirror.apply_rows([row(1, 4, 60)], [])
    assert not mirror.can_run and mirror.num_stalled == 1
    mirror.apply_grant(grant(2, extensions=[Extension(SequenceId(1), (BlockId(3),))]))
    assert mirror.can_run
