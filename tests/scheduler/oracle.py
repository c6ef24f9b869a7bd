"""What the model would say. Tokens depend on everything that came before them, as real ones do."""

from typing import NamedTuple
from zlib import crc32

from headrace_shared.codec import unpack_ids
from headrace_shared.messages import FinishReason, Request

NUM_TOKEN_IDS = 3
"""Few, so that independent texts share prefixes by chance."""


class Answer(NamedTuple):
    tokens: list[int]
    finish: FinishReason


def root(request: Request) -> int:
    """Identity of the empty context: keys and values of other salts must never be met."""
    return crc32(request.cache_salt.encode())


def extend(identity: int, token: int) -> int:
    """Identity of the keys and values of a position: a function of all tokens up to it."""
    return hash((identity, token))


def sample(request: Request, choice: int, index: int, identity: int) -> int:
    return hash((request.sampling.seed, choice, index, identity)) % NUM_TOKEN_IDS


def length(request: Request, choice: int) -> int:
    """Tokens until the choice ends."""
    return min(request.stop.max_tokens, 1 + hash((request.sampling.seed, choice)) % (request.stop.max_tokens + 3))


def finish(request: Request, choice: int) -> FinishReason:
    return FinishReason.LENGTH if length(request, choice) == request.stop.max_tokens else FinishReason.STOP


def answer(request: Request, choice: int) -> Answer:
    """What the client must get, whatever happens on the way."""
    identity = root(request)
    for token in unpack_ids(request.prompt):
        identity = extend(identity, token)
    tokens: list[int] = []
    for index in range(length(request, choice)):
        tokens.append(sample(request, choice, index, identity))
        identity = extend(identity, tokens[-1])
    return Answer(tokens, finish(request, choice))
