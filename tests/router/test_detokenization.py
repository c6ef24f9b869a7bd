"""Text comes out character by character and equals the decoding of the whole."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace_router.detokenization import Detokenizer, build_vocabulary
from headrace_shared.errors import ProtocolError
from tests.byte_model import byte_ids, byte_level_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
VOCABULARY = build_vocabulary(TOKENIZER.to_str().encode())
SIZE = TOKENIZER.get_vocab_size()


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁a", "th", "e", "ř", "▁🦉"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


@given(st.lists(st.integers(0, SIZE + 2), max_size=60), st.booleans())
def test_pieces_joined_equal_the_whole(ids: list[int], skip_special: bool) -> None:
    detokenizer = Detokenizer(VOCABULARY, skip_special=skip_special)
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
    assert text == TOKENIZER.decode([i for i in ids if i < SIZE], skip_special_tokens=skip_special)


@given(st.text(max_size=30))
def test_no_broken_character_in_between(text: str) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    shown = ""
    for token in byte_ids(text):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown + detokenizer.flush() == text


@given(st.lists(st.sampled_from(["▁", "▁the", "▁a", "th", "e", "ř", "▁🦉"]), max_size=20), st.text(max_size=8))
def test_sentencepiece_with_byte_fallback(pieces: list[str], text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [token_id(tokenizer, piece) for piece in pieces] + [3 + byte for byte in text.encode()]
    detokenizer = Detokenizer(build_vocabulary(tokenizer.to_str().encode()))
    assert "".join(detokenizer.push(i) for i in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    for length in (1, 2, 3):
        detokenizer = Detokenizer(VOCABULARY)
        shown = "".join(detokenizer.push(i) for i in byte_ids("🦉")[:length])
        assert shown + detokenizer.flush() == "\ufffd"


def test_an_added_token_with_a_space_keeps_it() -> None:
    tokenizer = byte_level_tokenizer(("<|a b|>", "ř"))
    vocabulary = build_vocabulary(tokenizer.to_str().encode())
    ids = [token_id(tokenizer, "<|a b|>"), token_id(tokenizer, "ř")]
    assert b"".join(map(vocabulary.bytes_of, ids)).decode() == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("broken", [b"", b"{}", b"[]", b'{"model": {"vocab": 5}}', b'{"model":{"vocab":{"a":"b"}}}'])
def test_nonsense_is_a_protocol_error(broken: bytes) -> None:
    with pytest.raises(ProtocolError):
        build_vocabulary(broken)


def test_an_unknown_decoder_is_refused() -> None:
    content = msgspec.json.decode(TOKENIZER.to_str())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ProtocolError, match="WordPiece"):
        build_vocabulary(msgspec.json.encode(content))
