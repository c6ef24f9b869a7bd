"""Thousands of random answers: whatever the tokens, frames, stop strings and endpoint, the text is the full decode, cut
exactly, and no character is ever broken."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace_router.call_record import AnswerForm
from headrace_router.choices import ChoiceDelta, ChoiceText, Delta, Usage
from headrace_router.detokenization import Vocabulary, build_vocabulary
from headrace_router.responses import Formatter, Identity, to_json, usage_object
from headrace_shared.messages import FinishReason, RequestId, TokenFrame
from tests.byte_model import SPECIAL, byte_characters

NUM_ANSWERS = 3000
TEXTS = (
    "안녕하세요 🦉 ř 👨‍👩‍👦",
    "plain ASCII, with\nlines\r\nand\ttabs  ",
    "e\u0301 é ﬁ Ａ Ω \u200b\u202e\ufeff x",
    "日本語のテキスト。中文文本！",
    "हिन्दी ไทย עברית عربى",
    "\U0001f1e8\U0001f1ff\U0001f9d1\U0001f3fd\u200d\U0001f692 \U0010ffff \ufffd \ufffe",
    "<|im_start|>no mark<|im_end|> </s> <0x41> ▁ Ġ",
)
BYTES = b"".join(text.encode() for text in TEXTS) + bytes(range(256))
ALPHABET = byte_characters()


class Kind(NamedTuple):
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    special: frozenset[int]


def byte_level() -> Kind:
    """Every byte, and pieces of real texts that were cut wherever it happened, in the middle of characters too."""
    rng = random.Random(1)
    pieces = {bytes([byte]) for byte in range(256)}
    while len(pieces) < 700:
        start = rng.randrange(len(BYTES) - 6)
        pieces.add(BYTES[start : start + rng.randint(2, 6)])
    names = ["".join(ALPHABET[byte] for byte in piece) for piece in sorted(pieces)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer)


def sentencepiece() -> Kind:
    """Words with their blank in front, and single bytes for all that is no word."""
    words = sorted({"▁" + word for text in TEXTS for word in text.split()} | {"▁", "th", "e", "ř"})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(word for word in words if "<0x" not in word)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_special(tokenizer)


def _with_special(tokenizer: Tokenizer) -> Kind:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    vocabulary = build_vocabulary(tokenizer.to_str().encode())
    return Kind(vocabulary, tokenizer, vocabulary.special_ids)


KINDS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def random_ids(kind: Kind, rng: random.Random) -> list[int]:
    """Half of them spell a text, token by token as long as there is one; the others are anything."""
    size = kind.tokenizer.get_vocab_size()
    if rng.random() < 0.5:
        return [rng.randrange(size + 3) for _ in range(rng.randint(1, 40))]
    by_bytes = _by_bytes(kind)
    left = rng.choice(TEXTS).encode()
    ids = []
    while left:
        length = rng.choice([n for n in range(1, 13) if left[:n] in by_bytes])
        ids.append(by_bytes[left[:length]])
        left = left[length:]
        if rng.random() < 0.02:
            ids.append(rng.choice(sorted(kind.special)))
    return ids[: rng.randint(1, len(ids))]


_KNOWN: dict[int, dict[bytes, int]] = {}


def _by_bytes(kind: Kind) -> dict[bytes, int]:
    if id(kind) not in _KNOWN:
        size = kind.tokenizer.get_vocab_size()
        table = kind.vocabulary.table(skip_special=False)
        _KNOWN[id(kind)] = {table[i]: i for i in range(size) if i not in kind.special and table[i]}
    return _KNOWN[id(kind)]


def decoded(kind: Kind, ids: Sequence[int], *, skip_special: bool) -> str:
    table = kind.vocabulary.table(skip_special=skip_special)
    return b"".join(table[token] for token in ids if token < len(table)).decode(errors="replace")


def cut(rng: random.Random, ids: Sequence[int]) -> list[TokenFrame]:
    frames = []
    index = 0
    while index < len(ids):
        size = rng.randint(1, 4)
        tokens = tuple(ids[index : index + size])
        finish = FinishReason.LENGTH if index + size >= len(ids) else None
        frames.append(
            TokenFrame(request_id=RequestId("0" * 32), choice=0, attempt=0, index=index, tokens=tokens, finish=finish)
        )
        index += size
    return frames


def pushed(text: ChoiceText, frames: Sequence[TokenFrame]) -> list[Delta]:
    deltas = []
    for frame in frames:
        deltas.append(text.push(frame))
        if text.finish is not None:
            break
    return deltas


def test_the_stream_joined_is_the_full_decode_and_no_character_is_broken(kind: Kind) -> None:
    rng = random.Random(2)
    size = kind.tokenizer.get_vocab_size()
    for _ in range(NUM_ANSWERS):
        ids, skip_special = random_ids(kind, rng), rng.random() < 0.5
        full = decoded(kind, ids, skip_special=skip_special)
        shown = ""
        for delta in pushed(ChoiceText(kind.vocabulary, skip_special=skip_special), cut(rng, ids)):
            shown += delta.text
            assert full.startswith(shown), (ids, shown, full)
        assert shown == full, ids
        theirs = kind.tokenizer.decode([i for i in ids if i < size], skip_special_tokens=skip_special)
        # Of ill-formed bytes the library makes one replacement or several, depending on what is around them.
        assert full == theirs or "\ufffd" in theirs, ids


def stops_in(rng: random.Random, full: str) -> list[str]:
    """Parts of the text, and what it might have contained."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(max(1, len(full)))
        part = full[start : start + rng.randint(1, 6)]
        stops.append(part if part and rng.random() < 0.8 else rng.choice(["###", "\n\n", "🦉🦉", "e\u0301"]))
    return stops


def expected_cut(full: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The first moment at which the text ends with a stop string, of those that end together the longest."""
    ends = [(full.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in full]
    if not ends:
        return full, None
    end, _, stop = min(ends)
    return full[: end if include else end - len(stop)], stop


def test_stop_strings_are_cut_exactly_wherever_tokens_and_frames_end(kind: Kind) -> None:
    rng = random.Random(3)
    num_matched = 0
    for _ in range(NUM_ANSWERS):
        ids, include = random_ids(kind, rng), rng.random() < 0.5
        full = decoded(kind, ids, skip_special=True)
        stops = stops_in(rng, full)
        text, stop = expected_cut(full, stops, include)
        choice = ChoiceText(kind.vocabulary, stops=tuple(dict.fromkeys(stops)), include_stop=include)
        deltas = pushed(choice, cut(rng, ids))
        assert "".join(delta.text for delta in deltas) == text, (ids, stops, include)
        assert deltas[-1].stop_reason == stop
        assert deltas[-1].finish is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
        num_matched += stop is not None
    assert num_matched > NUM_ANSWERS // 3


def answer(kind: Kind, form: AnswerForm) -> tuple[ChoiceText, Formatter]:
    choice = ChoiceText(kind.vocabulary, stops=form.stop_strings, include_stop=form.include_stop, keeps_ids=True)
    return choice, Formatter(Identity("id", 1, "m"), kind.vocabulary, form, num_logprobs=None)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_streamed_and_whole_answers_are_the_same_text(kind: Kind, is_chat: bool) -> None:
    rng = random.Random(4)
    for _ in range(NUM_ANSWERS // 10):
        ids, include = random_ids(kind, rng), rng.random() < 0.5
        stops = tuple(dict.fromkeys(stops_in(rng, decoded(kind, ids, skip_special=True))))
        form = AnswerForm(
            is_chat=is_chat,
            stream=True,
            include_usage=False,
            continuous_usage=False,
            skip_special_tokens=True,
            stop_strings=stops,
            include_stop=include,
            returns_ids=True,
        )
        choice, formatter = answer(kind, form)
        whole = _json(formatter.whole([pushed(choice, cut(rng, ids))], usage_object(Usage(1, 1, 0))))["choices"][0]
        choice, formatter = answer(kind, form)
        chunks = []
        for number, delta in enumerate(pushed(choice, cut(rng, ids)), 1):
            chunk = formatter.chunk(ChoiceDelta(0, delta, number), msgspec.UNSET)
            if chunk is not None:
                chunks.append(_json(chunk)["choices"][0])
        if is_chat:
            text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
            assert text == whole["message"]["content"]
        else:
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
        assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        for key in ("finish_reason", "stop_reason"):
            assert chunks[-1][key] == whole[key]


def _json(answer: Any) -> Any:
    return msgspec.json.decode(to_json(answer))
