"""How large the messages about one request can become, so that router and scheduler refuse by one formula. Pure."""

from headrace_shared.messages import Request

MIN_BLOCK_SIZE = 4
"""Smallest that a worker can be configured to."""
_FIXED_BYTES = 4096
"""Names, ids, numbers and the subject that acknowledges."""
_BYTES_PER_TOKEN = 4 + 5 / MIN_BLOCK_SIZE
"""Packed, and its share of a block id."""


def largest_message(request: Request) -> int:
    """An upper bound, in bytes, of any message that describes one of its choices: an admission again after the last
    token but one, or that in a snapshot. A request that cannot be described could never be handed over."""
    num_tokens = len(request.prompt) // 4 + request.stop.max_tokens
    return (
        _FIXED_BYTES
        + int(_BYTES_PER_TOKEN * num_tokens)
        + 5
        + 4 * sum(len(key) + len(value) for key, value in request.trace.items())
        + 16 * len(request.sampling.logit_bias)
        + 5 * len(request.stop.stop_token_ids)
        + 4 * len(request.sampling.grammar)
        + len(request.sampling.allowed_token_ids)
        + 5 * sum(1 + len(word) for word in request.sampling.bad_words)
        + 5 * len(request.sampling.logprob_token_ids)
        + 4 * len(request.adapter)
    )


def most_tokens(request: Request, max_payload: int) -> int:
    """The largest `max_tokens` with which the request can be described in `max_payload` bytes; may be below 1."""
    excess = largest_message(request) - max_payload
    return request.stop.max_tokens - (int(excess / _BYTES_PER_TOKEN) + 1 if excess > 0 else 0)
