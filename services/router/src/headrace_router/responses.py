"""The objects that clients get, as msgspec structs: encoding one chunk takes about a microsecond. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace_router.choices import ChoiceDelta, Delta, TokenText, Usage
from headrace_router.detokenization import Vocabulary
from headrace_shared.messages import FinishReason

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class UsageObject(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatMessageObject(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class Choice(Struct, frozen=True):
    index: int
    delta: ChatDelta | UnsetType = UNSET
    message: ChatMessageObject | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Answer(Struct, frozen=True):
    """A whole answer or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageObject | UnsetType | None = UNSET


class Identity(NamedTuple):
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str


class Formatter:
    """Writes one answer. `is_chat` and whether log-probabilities were asked for are fixed; per-choice state is only
    whether the choice has begun and, for whole answers, its pieces."""

    def __init__(self, identity: Identity, vocabulary: Vocabulary, *, is_chat: bool, num_logprobs: int | None) -> None:
        self._identity = identity
        self._vocabulary = vocabulary
        self._is_chat = is_chat
        self._num_logprobs = num_logprobs
        self._begun: set[int] = set()

    @property
    def model(self) -> str:
        return self._identity.model

    def chunk(self, event: ChoiceDelta, usage: UsageObject | UnsetType | None) -> Answer | None:
        """None if there is nothing to say: no text, because it is held back, and no end."""
        index, delta = event.choice, event.delta
        is_first = index not in self._begun
        if not (delta.text or delta.tokens or delta.finish) and not is_first:
            return None
        self._begun.add(index)
        logprobs = self._logprobs(delta.tokens)
        if self._is_chat:
            role = "assistant" if is_first else UNSET
            content = delta.text if delta.text or is_first else UNSET
            choice = Choice(
                index,
                delta=ChatDelta(role, content),
                logprobs=logprobs,
                finish_reason=delta.finish,
                stop_reason=delta.stop_reason,
            )
            return Answer(*self._head("chat.completion.chunk"), [choice], usage)
        choice = Choice(
            index, text=delta.text, logprobs=logprobs, finish_reason=delta.finish, stop_reason=delta.stop_reason
        )
        return Answer(*self._head("text_completion"), [choice], usage)

    def usage_chunk(self, usage: UsageObject) -> Answer:
        return Answer(*self._head("chat.completion.chunk" if self._is_chat else "text_completion"), [], usage)

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: UsageObject) -> Answer:
        """`deltas[i]` are all deltas of choice i."""
        choices = []
        for index, parts in enumerate(deltas):
            text = "".join(part.text for part in parts)
            logprobs = self._logprobs([token for part in parts for token in part.tokens])
            end = parts[-1]
            if self._is_chat:
                message = ChatMessageObject(text)
                choices.append(
                    Choice(
                        index, message=message, logprobs=logprobs, finish_reason=end.finish, stop_reason=end.stop_reason
                    )
                )
            else:
                choices.append(
                    Choice(index, text=text, logprobs=logprobs, finish_reason=end.finish, stop_reason=end.stop_reason)
                )
        return Answer(*self._head("chat.completion" if self._is_chat else "text_completion"), choices, usage)

    def _head(self, kind: str) -> tuple[str, str, int, str]:
        return self._identity.id, kind, self._identity.created, self._identity.model

    def _logprobs(self, tokens: Sequence[TokenText]) -> ChatLogprobs | CompletionLogprobs | None:
        if self._num_logprobs is None:
            return None
        if self._is_chat:
            return ChatLogprobs([self._token(token) for token in tokens])
        return CompletionLogprobs(
            tokens=[self._text(token.token) for token in tokens],
            token_logprobs=[_finite(token.logprobs.logprob) for token in tokens],
            top_logprobs=[self._top_of(token) for token in tokens] if self._num_logprobs else None,
            text_offset=[token.start for token in tokens],
        )

    def _top_of(self, token: TokenText) -> dict[str, float]:
        top = {self._text(likely.token): _finite(likely.logprob) for likely in token.logprobs.top}
        top.setdefault(self._text(token.token), _finite(token.logprobs.logprob))
        return top

    def _token(self, token: TokenText) -> TokenObject:
        data = self._vocabulary.bytes_of(token.token)
        top = [
            TopLogprobObject(
                self._text(likely.token), _finite(likely.logprob), list(self._vocabulary.bytes_of(likely.token))
            )
            for likely in token.logprobs.top[: self._num_logprobs]
        ]
        return TokenObject(data.decode(errors="replace"), _finite(token.logprobs.logprob), list(data), top)

    def _text(self, token: int) -> str:
        return self._vocabulary.bytes_of(token).decode(errors="replace")


def usage_object(usage: Usage) -> UsageObject:
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=CachedTokens(usage.cached_tokens),
    )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB) if logprob == logprob else _LOWEST_LOGPROB


_encode = msgspec.json.Encoder().encode


def to_json(answer: Answer | dict[str, Any]) -> bytes:
    return _encode(answer)
