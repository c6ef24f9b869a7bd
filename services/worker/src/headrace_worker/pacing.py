"""How much of the prompts joins an iteration in which others decode. Pure.

Each of those who decode waits for the whole iteration, so a prompt of thousands of tokens would stall them for as many
iterations as it takes. A long prompt's chunk is therefore cut to what lengthens an iteration by at most `slowdown`, as
measured lately. Where several long prompts wait, prompts are what the worker is busy with: then the bound grows
fourfold with each, until nothing of the throughput is given away.

Short prompts together are cut where an iteration full of them takes too long, as on slow processors: to what lasts
`SHORT_S`, or `SHORT_ITERATIONS` times as long as decoding alone, if that is more (each further iteration reads all
weights again, which must stay a small part of it). But never to less than `SHORT_HEADROOM` times what has lately come
of them for each token generated: else ever more of those who could decode would wait with their prompts.

What decoding alone takes is known from iterations without prompts. Where prompts never cease there would be none, and
what more sequences and longer contexts cost would be taken for the prompts' own price: after `ALONE_EVERY` iterations
one therefore leaves them out.
"""

import math

FIRST_CHUNK = 16
"""While it is not known what a token of a prompt costs; and the least chunk, so that a prompt always gets on."""
LONG_TOKENS = 1024
"""Shorter prompts are not long; nor is one that fits into an iteration."""
SHORT_S = 0.1
SHORT_ITERATIONS = 4.0
SHORT_HEADROOM = 1.5
LATELY = 1024
"""Tokens that are generated in the meantime."""
GROWTH = 4
ALONE_EVERY = 64
"""Iterations with prompts beside decodes between two that only decode, at most."""
_NEW = 0.125
"""Weight of a new measurement."""
MAX_AGE = 5
"""Of what is known, in iterations: a new measurement replaces half of it at most, since one may have met a hiccup."""


class Pacer:
    def __init__(self, slowdown: float, tokens_per_iteration: int) -> None:
        """`slowdown`: 1.5 lets an iteration take half as long again; 0 is no bound, of short prompts neither."""
        self._slowdown = slowdown
        self._tokens_per_iteration = tokens_per_iteration
        self._long = max(LONG_TOKENS, tokens_per_iteration)
        self._decode_s: float | None = None
        """Duration of an iteration that only decodes."""
        self._token_s: float | None = None
        """What each token of a prompt adds to it."""
        self._share = 0.0
        """Tokens of short prompts for each token generated."""
        self._num_composed = 0
        """Iterations that decode since the last one without prompts was composed or seen."""
        self._num_mixed = 0
        """Iterations with prompts since `_decode_s` was measured."""

    def is_long(self, num_tokens: int) -> bool:
        """Of the tokens of a prompt that are to be computed."""
        return num_tokens > self._long

    def allowance(self, num_long: int) -> int:
        """Most tokens of long prompts, of which there are so many, in the next iteration that decodes."""
        if not self._slowdown or not num_long:
            return self._tokens_per_iteration
        if self._is_alone:
            return 0
        chunk = FIRST_CHUNK
        if self._decode_s is not None and self._token_s is not None and self._token_s > 0.0:
            chunk = max(FIRST_CHUNK, int((self._slowdown - 1.0) * self._decode_s / self._token_s))
        growth: int = GROWTH ** min(num_long - 1, 8)
        return min(self._tokens_per_iteration, chunk * growth)

    def short_allowance(self, num_decoding: int) -> int:
        """Most tokens of all other prompts together in the next iteration, in which so many decode."""
        if self._slowdown and self._is_alone:
            return 0
        if not self._slowdown or self._decode_s is None or not self._token_s:
            return self._tokens_per_iteration
        by_time = max(SHORT_S, SHORT_ITERATIONS * self._decode_s) / self._token_s
        by_balance = SHORT_HEADROOM * self._share * num_decoding
        return min(self._tokens_per_iteration, max(FIRST_CHUNK, int(max(by_time, by_balance))))

    @property
    def _is_alone(self) -> bool:
        """The next iteration, if it decodes, only decodes."""
        return self._num_composed >= ALONE_EVERY

    def composed(self, num_decoding: int, num_short_tokens: int) -> None:
        """What an iteration consists of, but for long prompts."""
        if num_decoding:
            # Whatever becomes of the measurement, prompts wait for one iteration.
            self._num_composed = 0 if self._is_alone else self._num_composed + 1
        share = self._share * math.exp(-num_decoding / LATELY) + num_short_tokens / LATELY
        # Where nobody decodes nothing is forgotten.
        self._share = min(share, self._tokens_per_iteration)

    def observe(self, num_decoding: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """An iteration is over."""
        if not num_decoding:
            return
        if not num_prompt_tokens:
            self._num_composed = 0
            self._decode_s = _mixed(self._decode_s, elapsed_s, min(1 + self._num_mixed, MAX_AGE))
            self._num_mixed = 0
            return
        self._num_mixed += 1
        if num_prompt_tokens >= FIRST_CHUNK and self._decode_s is not None:
            self._token_s = _mixed(self._token_s, max(0.0, elapsed_s - self._decode_s) / num_prompt_tokens)


def _mixed(known: float | None, new: float, age: int = 1) -> float:
    """`age`: in iterations; the older what is known, the more the new one counts."""
    return new if known is None else known + (1.0 - (1.0 - _NEW) ** age) * (new - known)
