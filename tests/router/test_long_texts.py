"""Of long texts no more is encoded than is needed, and what comes out is what encoding all of it gives."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from headrace_router import long_texts
from headrace_router.long_texts import MAX_CHARS, TooManyTokens, check_count, encode_tail
from tests.byte_model import byte_level_tokenizer

WORDS = "the wheel in the stream turns, and the water (in spring) is high.\n"
LETTERS = "ther in the e" * 3000
PIECE_CHARS = 4096


def gpt2_like() -> Tokenizer:
    return byte_level_tokenizer()


def llama_like() -> Tokenizer:
    """One word, from beginning to end."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    return tokenizer


def unigram_like() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((char, -9.0) for char in set(WORDS)), ("the", -2.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


class Encoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_chars = 0

    def __call__(self, text: str) -> list[int]:
        self.num_chars += len(text)
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


KINDS = pytest.mark.parametrize("make", [gpt2_like, llama_like, unigram_like])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE_CHARS", PIECE_CHARS)


@KINDS
@pytest.mark.parametrize("most", [1, 7, 1000])
def test_the_tail_is_that_of_the_whole_text(make: Callable[[], Tokenizer], most: int) -> None:
    text = WORDS * 1000
    whole = make().encode(text).ids
    encoder = Encoder(make())
    tail = encode_tail(encoder, text, most)
    assert tail.ids == whole[-most:] and not tail.is_whole
    assert encoder.num_chars < len(text)


@pytest.mark.parametrize("text", ["", "a", WORDS, WORDS * 20])
def test_a_short_text_has_no_other_tail(text: str) -> None:
    whole = gpt2_like().encode(text).ids
    assert encode_tail(Encoder(gpt2_like()), text, 10_000) == (whole, True)
    cut = encode_tail(Encoder(gpt2_like()), text, 5)
    assert cut == (whole[-5:], len(whole) <= 5)


def test_more_is_looked_at_where_tokens_are_long() -> None:
    """Blanks of which a thousand are one token."""
    encoder = Encoder(gpt2_like())

    def encode(text: str) -> list[int]:
        encoder(text[:1])
        encoder.num_chars += len(text)
        return [1] * (len(text) // 1000)

    tail = encode_tail(encode, " " * MAX_CHARS * 2, 1500)
    assert tail == ([1] * 1500, False) and encoder.num_chars < 2 * MAX_CHARS


@KINDS
def test_a_text_of_too_many_tokens_is_refused_after_its_beginning(make: Callable[[], Tokenizer]) -> None:
    encoder = Encoder(make())
    text = WORDS * 3000
    with pytest.raises(TooManyTokens) as caught:
        check_count(encoder, text, 1000)
    assert encoder.num_chars <= 4 * PIECE_CHARS
    assert 1000 < caught.value.num_tokens <= len(make().encode(text).ids)


@KINDS
@pytest.mark.parametrize("text", [WORDS * 600, LETTERS])
def test_what_fits_is_never_refused(make: Callable[[], Tokenizer], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MAX_UNCOUNTED_CHARS", 0)
    check_count(Encoder(make()), text, len(make().encode(text).ids))


def test_an_ordinary_text_that_fits_is_encoded_once() -> None:
    encoder = Encoder(gpt2_like())
    check_count(encoder, WORDS * 1000, 20_000)
    assert not encoder.num_chars
