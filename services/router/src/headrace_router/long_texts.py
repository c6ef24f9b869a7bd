"""Long texts to tokens within bounds of time and memory: no more of them is encoded than is needed. Pure.

An encoding takes some 90 bytes a character while it is made, and 200 a token: sixteen megabytes took 1.3 GB and six
seconds, to be refused or cut down to a few thousand tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

Encode = Callable[[str], list[int]]

PIECE_CHARS = 32 * 1024
"""Encoded at a time to count tokens."""
MAX_UNCOUNTED_CHARS = 128 * 1024
"""Encoded without being counted before: it may be three tokens a character."""
MAX_CHARS = 2 << 20
"""Encoded at once, of a text whose tokens were counted; and of a chat, before it is rendered."""
USUAL_CHARS_PER_TOKEN = 6
SEAM_TOKENS = 64
"""So many tokens around a place where a text was cut may be others than in the whole text."""


class TooManyTokens(Exception):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        """At least."""


class Tail(NamedTuple):
    ids: list[int]
    is_whole: bool
    """Nothing was left out."""


def check_count(encode: Encode, text: str, most: int) -> None:
    """Raises TooManyTokens for a long text of more than `most` tokens: as a rule soon, for its beginning is enough.
    Shorter ones are let pass; what there is of them is known when they have been encoded."""
    if len(text) <= max(PIECE_CHARS, min(MAX_UNCOUNTED_CHARS, USUAL_CHARS_PER_TOKEN * most)):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += max(0, len(encode(text[start : start + PIECE_CHARS])) - SEAM_TOKENS)
        if num_tokens > most:
            raise TooManyTokens(num_tokens)


def encode_tail(encode: Encode, text: str, most: int) -> Tail:
    """The last `most` tokens. Of a text above MAX_CHARS only the end is looked at."""
    num_chars = PIECE_CHARS
    while num_chars < min(MAX_CHARS, len(text)):
        ids = encode(text[-num_chars:])
        if len(ids) >= most + SEAM_TOKENS:
            return Tail(ids[-most:], is_whole=False)
        likely = num_chars * (most + SEAM_TOKENS) / max(1, len(ids))
        num_chars = max(2 * num_chars, round(1.1 * likely))
    ids = encode(text[-MAX_CHARS:])
    return Tail(ids[-most:], is_whole=len(text) <= MAX_CHARS and len(ids) <= most)
