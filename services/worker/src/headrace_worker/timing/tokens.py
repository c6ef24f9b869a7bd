"""The tokens of a worker that computes none: a pure function of the request and the position, so that any worker goes
on where another stopped."""

import zlib

from headrace_shared.messages import Request, TokenId

_MASK = 2**64 - 1


def noise(seed: int, choice: int, index: int) -> int:
    """64 bits that look random. The mixing function is splitmix64's (Steele, Lea, Flood, 2014)."""
    mixed = (seed + 0x9E3779B97F4A7C15 * (index + 1) + 0xD1B54A32D192ED03 * choice) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class TokenStream:
    """The answer to one choice of a request, by output index."""

    __slots__ = ("_choice", "_end_below", "_first", "_min_tokens", "_num", "_seed", "_stop_token")

    def __init__(self, request: Request, choice: int, vocab_size: int, mean_tokens: int) -> None:
        """`mean_tokens`: how long answers are on average, geometrically distributed; 0: until max_tokens. An answer
        without stop tokens never ends early. Greedy answers follow from the prompt alone, others from the seed."""
        greedy = request.sampling.temperature == 0.0
        self._seed = zlib.crc32(request.prompt) if greedy else request.sampling.seed
        self._choice = 0 if greedy else choice
        stop = request.stop
        # Special tokens and single bytes have the lowest ids in most vocabularies, and others the highest.
        self._first = min(1024, vocab_size // 4)
        self._num = max(1, vocab_size - 2 * self._first)
        self._stop_token = stop.stop_token_ids[0] if stop.stop_token_ids and mean_tokens else None
        self._min_tokens = stop.min_tokens
        self._end_below = _MASK // mean_tokens if mean_tokens else 0

    def token(self, index: int) -> TokenId:
        drawn = noise(self._seed, self._choice, index)
        if self._stop_token is not None and index >= self._min_tokens and drawn < self._end_below:
            return TokenId(self._stop_token)
        return TokenId(self._first + drawn % self._num)
