"""Each token once and in order, whatever the broker repeats, loses or delays."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.token_log import Cursor, Verdict
from headrace_shared.messages import FinishReason, RequestId, TokenFrame

REQUEST = RequestId("00" * 16)


def frame(index: int, tokens: tuple[int, ...], attempt: int = 0, finish: FinishReason | None = None) -> TokenFrame:
    return TokenFrame(request_id=REQUEST, choice=0, attempt=attempt, index=index, tokens=tokens, finish=finish)


def test_frames_in_order() -> None:
    cursor = Cursor()
    for i in range(3):
        assert cursor.judge(frame(i, (i,))) is Verdict.NEXT
        assert cursor.advance(frame(i, (i,))).tokens == (i,)
    assert cursor.judge(frame(1, (1,))) is Verdict.OLD
    assert cursor.judge(frame(4, (4,))) is Verdict.GAP


def test_the_new_part_of_an_overlapping_frame() -> None:
    cursor = Cursor()
    cursor.advance(frame(0, (0, 1, 2)))
    longer = frame(1, (1, 2, 3, 4), attempt=1, finish=FinishReason.LENGTH)
    assert cursor.judge(longer) is Verdict.NEXT
    fresh = cursor.advance(longer)
    assert (fresh.index, fresh.tokens, fresh.finish) == (3, (3, 4), FinishReason.LENGTH)
    assert cursor.is_finished
    assert cursor.judge(frame(5, (5,))) is Verdict.OLD


def test_a_lower_attempt_is_old_news() -> None:
    cursor = Cursor()
    cursor.advance(frame(0, (0,), attempt=1))
    assert cursor.judge(frame(1, (9,), attempt=0)) is Verdict.OLD


def test_a_finish_without_tokens_counts_once() -> None:
    cursor = Cursor()
    cursor.advance(frame(0, (0,)))
    end = frame(1, (), finish=FinishReason.LENGTH)
    assert cursor.judge(end) is Verdict.NEXT
    assert cursor.advance(end).tokens == ()
    assert cursor.judge(end) is Verdict.OLD


def test_repair_takes_what_an_earlier_attempt_left_and_then_the_new_one() -> None:
    cursor = Cursor()
    cursor.advance(frame(0, (0, 1)))
    logged = [
        frame(0, (0, 1)),
        frame(2, (2, 3)),
        frame(4, (40, 50)),  # a zombie, beyond where the next attempt begins
        frame(4, (4,), attempt=1),
        frame(5, (5,), attempt=1, finish=FinishReason.LENGTH),
    ]
    tokens = [token for fresh in cursor.repair(logged) for token in fresh.tokens]
    assert tokens == [2, 3, 4, 5]
    assert cursor.is_finished


def test_repair_takes_the_end_from_an_earlier_attempt_if_only_that_has_one() -> None:
    cursor = Cursor()
    cursor.advance(frame(0, (0, 1, 2), attempt=1))
    fresh = cursor.repair([frame(0, (0, 1)), frame(2, (2, 3), finish=FinishReason.STOP), frame(1, (1, 2), attempt=1)])
    assert [part.tokens for part in fresh] == [(3,)] and cursor.is_finished
    at_the_end = Cursor()
    at_the_end.advance(frame(0, (0, 1), attempt=1))
    assert [part.finish for part in at_the_end.repair([frame(0, (0, 1), finish=FinishReason.LENGTH)])] == [
        FinishReason.LENGTH
    ]


def test_repair_stops_at_what_is_really_missing() -> None:
    cursor = Cursor()
    assert cursor.repair([frame(1, (1,)), frame(2, (2,))]) == []
    assert cursor.next_index == 0


@given(st.data())
def test_any_delivery_of_a_log_with_repair_gives_each_token_once(data: st.DataObject) -> None:
    """Attempts that begin anywhere before their predecessor's end; delivery with losses and repetitions."""
    length = data.draw(st.integers(1, 12))
    logged: list[TokenFrame] = []
    known = 0
    for attempt in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, known)) if attempt else 0
        end = data.draw(st.integers(start, length))
        while start < end:
            size = data.draw(st.integers(1, end - start))
            logged.append(frame(start, tuple(range(start, start + size)), attempt))
            start += size
        known = max(known, end)
    last = logged[-1].attempt + 1 if logged else 0
    logged.append(frame(known, tuple(range(known, length)), last, FinishReason.LENGTH))
    delivered = [f for f in logged for _ in range(data.draw(st.integers(0, 2)))]
    cursor = Cursor()
    tokens: list[int] = []
    for event in delivered:
        verdict = cursor.judge(event)
        if verdict is Verdict.NEXT:
            tokens += cursor.advance(event).tokens
    for fresh in cursor.repair(logged):
        tokens += fresh.tokens
    assert tokens == list(range(length))
    assert cursor.is_finished
