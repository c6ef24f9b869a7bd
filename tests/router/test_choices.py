"""Frames to deltas: stop tokens, stop strings, limits in the middle of a character, log-probabilities."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.choices import ChoiceText, Delta
from headrace_router.detokenization import build_vocabulary
from headrace_shared.messages import FinishReason, RequestId, TokenFrame, TokenLogprobs
from tests.byte_model import END, byte_ids, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
VOCABULARY = build_vocabulary(TOKENIZER.to_str().encode())
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def frame(tokens: list[int], finish: FinishReason | None = None, *, logprobs: bool = False) -> TokenFrame:
    values = tuple(TokenLogprobs(-float(token), ()) for token in tokens) if logprobs else ()
    request = RequestId("00" * 16)
    return TokenFrame(
        request_id=request, choice=0, attempt=0, index=0, tokens=tuple(tokens), logprobs=values, finish=finish
    )


def choice(*stops: str, include_stop: bool = False, min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(VOCABULARY, stops=stops, include_stop=include_stop, min_tokens=min_tokens, eos_token_ids=(END,))


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_a_stop_token_is_counted_and_not_shown() -> None:
    text = ChoiceText(VOCABULARY, skip_special=False, eos_token_ids=(END,))
    delta = text.push(frame([*byte_ids("ab"), END], STOP))
    assert (delta.text, delta.finish, delta.stop_reason) == ("ab", STOP, None)
    assert text.num_tokens == 3


def test_a_stop_token_of_the_client_is_named() -> None:
    token = byte_ids("x")[0]
    delta = choice().push(frame([*byte_ids("a"), token], STOP))
    assert (delta.text, delta.stop_reason) == ("a", token)


def test_a_stop_token_is_shown_on_demand() -> None:
    delta = choice(include_stop=True).push(frame(byte_ids("ax"), STOP))
    assert delta.text == "ax"


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    text = choice("two three")
    assert text.push(frame(byte_ids("two"))).text == ""
    assert text.push(frame([END], STOP)).text == "two"


def test_a_stop_string_ends_the_choice_and_later_tokens_do_not_count() -> None:
    text = choice("lo w")
    delta = text.push(frame(byte_ids("hello world"), LENGTH))
    assert (delta.text, delta.finish, delta.stop_reason) == ("hel", STOP, "lo w")
    assert text.num_tokens == len("hello w")


def test_a_stop_string_cannot_begin_in_forced_text() -> None:
    text = choice("ab", min_tokens=3)
    deltas = [text.push(frame([token])) for token in byte_ids("abaab")]
    assert joined(deltas) == "aba"
    assert deltas[-1].finish is STOP


def test_a_limit_in_the_middle_of_a_character() -> None:
    for length in (1, 2, 3):
        text = choice()
        deltas = [text.push(frame([token])) for token in byte_ids("🦉")[: length - 1]]
        deltas.append(text.push(frame(byte_ids("🦉")[length - 1 : length], LENGTH)))
        assert joined(deltas) == "\ufffd"
        assert text.num_tokens == length


def test_logprobs_wait_for_the_text_they_belong_to() -> None:
    text = choice("abc")
    first = text.push(frame(byte_ids("xab"), logprobs=True))
    assert first.text == "x"
    assert [token.token for token in first.tokens] == byte_ids("x")
    second = text.push(frame(byte_ids("d"), logprobs=True))
    assert [(token.token, token.start) for token in second.tokens] == list(zip(byte_ids("abd"), (1, 2, 3), strict=True))


def test_logprobs_of_what_a_stop_string_cut_off_are_not_shown() -> None:
    text = choice("bc")
    deltas = [text.push(frame([token], logprobs=True)) for token in byte_ids("abc")]
    assert [token.token for delta in deltas for token in delta.tokens] == byte_ids("a")


def test_logprobs_of_a_split_character_are_all_shown() -> None:
    text = choice()
    deltas = [text.push(frame([token], logprobs=True)) for token in byte_ids("🦉")[:3]]
    deltas.append(text.push(frame([], LENGTH)))
    assert [token.token for delta in deltas for token in delta.tokens] == byte_ids("🦉")[:3]


@given(
    st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=40),
    st.lists(st.text("abt he", min_size=1, max_size=3), max_size=3),
    st.data(),
)
def test_frames_cut_in_any_way_give_the_same_answer(ids: list[int], stops: list[str], data: st.DataObject) -> None:
    whole = choice(*stops)
    expected = whole.push(frame(ids, LENGTH, logprobs=True))
    pieces = choice(*stops)
    deltas: list[Delta] = []
    position = 0
    while position < len(ids) and pieces.finish is None:
        size = data.draw(st.integers(1, len(ids) - position))
        position += size
        finish = LENGTH if position == len(ids) else None
        deltas.append(pieces.push(frame(ids[position - size : position], finish, logprobs=True)))
    assert joined(deltas) == expected.text
    assert [token for delta in deltas for token in delta.tokens] == list(expected.tokens)
    assert (deltas[-1].finish, pieces.num_tokens) == (expected.finish, whole.num_tokens)


@given(st.lists(st.integers(1, 8), min_size=1))
def test_no_logprob_is_told_of_a_character_that_a_stop_string_takes(cuts: list[int]) -> None:
    text = choice("🦉c")
    ids = byte_ids("é🦉🦉cd")
    told: list[int] = []
    shown = ""
    while ids and text.finish is None:
        part, ids = ids[: cuts[0]], ids[cuts[0] :]
        cuts = cuts[1:] or [1]
        delta = text.push(frame(part, logprobs=True))
        told += [token.token for token in delta.tokens]
        shown += delta.text
        assert told == byte_ids(shown)
    assert shown == "é🦉" and text.finish is STOP
