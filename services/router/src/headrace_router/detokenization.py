"""Token ids to text, one at a time and never half a character. Pure.

A token stands for bytes, not for characters. So the vocabulary is turned into a table of bytes once, and an
incremental UTF-8 decoder does the rest: bytes of an unfinished character wait for the next token. Ill-formed bytes
become U+FFFD as everywhere else; a character that is unfinished at the end becomes one U+FFFD.
"""

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace_shared.errors import ProtocolError

MAX_TOKENS = 1 << 22
"""Highest id of a token: there is a table of all."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Vocabulary:
    """The bytes of every token of a tokenizer.json."""

    def __init__(self, table: Sequence[bytes], special_ids: frozenset[int]) -> None:
        self._table = tuple(table)
        self.special_ids = special_ids
        self._without_special = tuple(b"" if i in special_ids else data for i, data in enumerate(self._table))

    def bytes_of(self, token: int) -> bytes:
        """Ids beyond the tokenizer's own (models pad their vocabularies) stand for nothing."""
        return self._table[token] if 0 <= token < len(self._table) else b""

    def table(self, *, skip_special: bool) -> tuple[bytes, ...]:
        return self._without_special if skip_special else self._table


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._table = vocabulary.table(skip_special=skip_special)
        self._decoder = _new_decoder("replace")
        self._decode = self._decoder.decode

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decode(self._table[token]) if 0 <= token < len(self._table) else ""

    @property
    def is_inside(self) -> bool:
        """Of a character: the bytes of the last tokens have not become text yet."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """No token follows: one U+FFFD if a character is unfinished."""
        return self._decode(b"", True)


def build_vocabulary(tokenizer_json: bytes) -> Vocabulary:
    """Raises ProtocolError for a tokenizer whose decoder is none of the two in use: byte-level BPE, and
    SentencePiece-like with byte fallback."""
    try:
        content = msgspec.json.decode(tokenizer_json)
        to_bytes = _converter(content.get("decoder") or {})
        tokens = _tokens(content["model"]["vocab"])
        added = content.get("added_tokens") or []
        ids = [*tokens.values(), *(token["id"] for token in added)]
        if not all(isinstance(token_id, int) and 0 <= token_id < MAX_TOKENS for token_id in ids):
            raise ValueError(f"a token's id is not from 0 to {MAX_TOKENS - 1}")
        size = max(ids, default=-1) + 1
        table = [b""] * size
        for text, token_id in tokens.items():
            table[token_id] = to_bytes(text)
        for token in added:
            table[token["id"]] = to_bytes(token["content"])
        special = frozenset(token["id"] for token in added if token.get("special"))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, msgspec.DecodeError) as error:
        raise ProtocolError(f"tokenizer.json is not usable: {error!r:.200}") from error
    return Vocabulary(table, special)


def _tokens(vocabulary: Any) -> dict[str, int]:
    if isinstance(vocabulary, list):  # Unigram: [[text, score], …]
        return {text: token_id for token_id, (text, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _converter(decoder: Mapping[str, Any]) -> Any:
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"ByteFallback", "Metaspace"}:
        # `Strip` removes the space that SentencePiece puts before a text; an answer continues one, so it stays.
        return _sentencepiece_bytes
    raise ProtocolError(f"decoder {sorted(map(str, kinds))} is not supported")


def _sentencepiece_bytes(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:
        return text.encode()


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
