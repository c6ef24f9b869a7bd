"""Log-probabilities as clients get them: of chats, of completions, and of prompts. Pure."""

from collections.abc import Sequence

from msgspec import Struct

from headrace_router.choices import TokenText
from headrace_router.detokenization import Vocabulary
from headrace_shared.messages import TokenLogprobs

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class TopLogprobObject(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenObject(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobObject]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenObject]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one element a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None: of a prompt's first token, which follows nothing."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptTokenObject(Struct, frozen=True):
    logprob: float
    rank: int | None
    """1: none is likelier. None: not known."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptTokenObject] | None]
"""For each token of a prompt, by id, itself and the likeliest ones; null for the first."""


class LogprobWriter:
    def __init__(self, vocabulary: Vocabulary, num_alternatives: int) -> None:
        """`num_alternatives`: tokens that are told beside each one."""
        self._vocabulary = vocabulary
        self._num_alternatives = num_alternatives

    def of_chat(self, tokens: Sequence[TokenText]) -> ChatLogprobs:
        return ChatLogprobs([self._token(token.token, token.logprobs) for token in tokens if token.logprobs])

    def of_completion(self, tokens: Sequence[TokenText]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._text(token.token) for token in tokens],
            token_logprobs=[None if token.logprobs is None else _finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=[self._top_of(token) for token in tokens] if self._num_alternatives else None,
            text_offset=[token.start for token in tokens],
        )

    def of_prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprobs], num_alternatives: int) -> PromptLogprobs:
        """`scores` of all tokens but the first."""
        found: PromptLogprobs = [None]
        for token, score in zip(ids[1:], scores, strict=True):
            entries = {token: PromptTokenObject(_finite(score.logprob), score.rank or None, self._text(token))}
            for rank, likely in enumerate(score.top[:num_alternatives], 1):
                if likely.token != token:
                    text = self._text(likely.token)
                    entries[likely.token] = PromptTokenObject(_finite(likely.logprob), rank, text)
            found.append(entries)
        return found

    def _top_of(self, token: TokenText) -> dict[str, float] | None:
        if token.logprobs is None:
            return None
        top: dict[str, float] = {}
        # Different tokens may have the same text, half a character, say: the likelier one keeps its place.
        for likely in token.logprobs.top[: self._num_alternatives]:
            top.setdefault(self._text(likely.token), _finite(likely.logprob))
        top.setdefault(self._text(token.token), _finite(token.logprobs.logprob))
        return top

    def _token(self, token: int, logprobs: TokenLogprobs) -> TokenObject:
        data = self._vocabulary.bytes_of(token)
        top = [
            TopLogprobObject(
                self._text(likely.token), _finite(likely.logprob), list(self._vocabulary.bytes_of(likely.token))
            )
            for likely in logprobs.top[: self._num_alternatives]
        ]
        return TokenObject(data.decode(errors="replace"), _finite(logprobs.logprob), list(data), top)

    def _text(self, token: int) -> str:
        return self._vocabulary.bytes_of(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB) if logprob == logprob else _LOWEST_LOGPROB
