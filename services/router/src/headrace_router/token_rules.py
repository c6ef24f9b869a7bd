"""What a client says about single tokens and words, checked against the width of the logits. Pure.

Raises InvalidRequest, naming the field.
"""

from collections.abc import Mapping, Sequence

from headrace_router.call_limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_NAMED_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
)
from headrace_router.ranges import short
from headrace_router.schemas import GenerationBody
from headrace_shared.errors import InvalidRequest
from headrace_shared.fleet_messages import ModelCard


def logit_bias(given: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise InvalidRequest(f"'logit_bias' may have at most {MAX_BIASES} entries.", param="logit_bias")
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < card.vocab_size):
            raise InvalidRequest(
                f"'logit_bias' has the key '{key[:32]}', which is no token id from 0 to {card.vocab_size - 1}.",
                param="logit_bias",
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"'logit_bias' of token {key} must be from -100 to 100, not {short(bias)}.", param="logit_bias"
            )
        biases[int(key)] = float(bias)
    return biases


def stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' may have at most {MAX_STOPS} strings.", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"Each 'stop' string must have 1 to {MAX_STOP_CHARS} characters.", param="stop")
    return tuple(dict.fromkeys(stops))


def stop_tokens(given: Sequence[int] | None, card: ModelCard) -> tuple[int, ...]:
    return _token_ids("stop_token_ids", given or (), card, MAX_STOP_TOKENS)


def allowed_tokens(given: Sequence[int] | None, card: ModelCard, never: Sequence[int]) -> tuple[int, ...]:
    """`never`: tokens that will not be drawn for another reason; another one must be left."""
    if given is None:
        return ()
    if not given:
        raise InvalidRequest("'allowed_token_ids' must not be empty.", param="allowed_token_ids", code="empty_array")
    allowed = _token_ids("allowed_token_ids", given, card, MAX_ALLOWED_TOKENS)
    if not set(allowed).difference(never):
        raise InvalidRequest(
            "'allowed_token_ids' has only tokens that 'min_tokens' forbids.", param="allowed_token_ids"
        )
    return tuple(sorted(set(allowed)))


def named_tokens(body: GenerationBody, card: ModelCard, *, has_logprobs: bool) -> tuple[int, ...]:
    """Whose log-probabilities are wanted."""
    if not body.logprob_token_ids:
        return ()
    if not has_logprobs:
        raise InvalidRequest("'logprob_token_ids' needs 'logprobs'.", param="logprob_token_ids")
    ids = _token_ids("logprob_token_ids", body.logprob_token_ids, card, MAX_NAMED_TOKENS)
    return tuple(dict.fromkeys(ids))


def bad_words(given: Sequence[str] | None) -> tuple[str, ...]:
    """Not tokenized yet."""
    words = given or ()
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"'bad_words' may have at most {MAX_BAD_WORDS} words.", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"Each of 'bad_words' must have 1 to {MAX_BAD_WORD_CHARS} characters that are not all blanks.",
                param="bad_words",
            )
    return tuple(dict.fromkeys(words))


def check_some_left(
    words: Sequence[Sequence[int]], never: Sequence[int], allowed: Sequence[int], card: ModelCard
) -> None:
    """Whatever comes, some token may follow: one that ends no bad word. `never`: not drawn for another reason."""
    lost = {word[-1] for word in words}.union(never)
    left = set(allowed).difference(lost) if allowed else card.vocab_size > len(lost)
    if words and not left:
        raise InvalidRequest("'bad_words' might leave no token that may be drawn.", param="bad_words")


def check_ids(field: str, ids: Sequence[int], card: ModelCard) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < card.vocab_size):
        bad = next(i for i in ids if not 0 <= i < card.vocab_size)
        raise InvalidRequest(
            f"'{field}' has {short(bad)}, which is no token id from 0 to {card.vocab_size - 1}.", param=field
        )


def _token_ids(field: str, ids: Sequence[int], card: ModelCard, most: int) -> tuple[int, ...]:
    if len(ids) > most:
        raise InvalidRequest(f"'{field}' may have at most {most} token ids.", param=field)
    check_ids(field, ids, card)
    return tuple(ids)
