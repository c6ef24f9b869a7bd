"""The objects that clients get, as msgspec structs: encoding one chunk takes about a microsecond. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace_router.call_reader import CallPiece, CallReader, Found
from headrace_router.choices import ChoiceDelta, Delta, TokenText, Usage
from headrace_router.detokenization import Vocabulary
from headrace_router.tools import CallFormat, ToolUse
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


class FunctionObject(Struct, frozen=True):
    name: str | UnsetType
    arguments: str
    """JSON, as the model wrote it; in a chunk a piece of it."""


class ToolCallObject(Struct, frozen=True):
    index: int | UnsetType
    """In chunks."""
    id: str | UnsetType
    """In chunks, like the type and the name, where the call begins."""
    type: str | UnsetType
    function: FunctionObject


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallObject] | UnsetType = UNSET


class ChatMessageObject(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallObject] | UnsetType = UNSET


class Choice(Struct, frozen=True):
    index: int
    delta: ChatDelta | UnsetType = UNSET
    message: ChatMessageObject | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
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

    def __init__(
        self,
        identity: Identity,
        vocabulary: Vocabulary,
        *,
        is_chat: bool,
        num_logprobs: int | None,
        tools: ToolUse | None = None,
    ) -> None:
        self._identity = identity
        self._tools = tools
        self._readers: dict[int, CallReader] = {}
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
            found = self._read(index, delta)
            calls = [self._call(index, piece, is_chunk=True) for piece in found.calls]
            if not (found.text or calls or delta.tokens or delta.finish) and not is_first:
                return None
            role = "assistant" if is_first else UNSET
            content = found.text if found.text or (is_first and not calls) else UNSET
            choice = Choice(
                index,
                delta=ChatDelta(role, content, calls or UNSET),
                logprobs=logprobs,
                finish_reason=self._finish(index, delta),
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
                found = self._read(index, end._replace(text=text))
                calls = [self._call(index, piece, is_chunk=False) for piece in found.calls]
                content = found.text if found.text or not calls else None
                choices.append(
                    Choice(
                        index,
                        message=ChatMessageObject(content, tool_calls=calls or UNSET),
                        logprobs=logprobs,
                        finish_reason=self._finish(index, end),
                        stop_reason=end.stop_reason,
                    )
                )
            else:
                choices.append(
                    Choice(index, text=text, logprobs=logprobs, finish_reason=end.finish, stop_reason=end.stop_reason)
                )
        return Answer(*self._head("chat.completion" if self._is_chat else "text_completion"), choices, usage)

    def _read(self, index: int, delta: Delta) -> Found:
        if self._tools is None:
            return Found(delta.text)
        reader = self._readers.setdefault(index, CallReader(self._tools))
        return reader.push(delta.text, is_last=delta.finish is not None)

    def _call(self, choice: int, piece: CallPiece, *, is_chunk: bool) -> ToolCallObject:
        """Ids are the same wherever the answer is written."""
        begins = piece.name is not None
        digest = hashlib.sha256(f"{self._identity.id}/{choice}/{piece.number}".encode()).hexdigest()
        return ToolCallObject(
            index=piece.number if is_chunk else UNSET,
            id=f"call_{digest[:24]}" if begins else UNSET,
            type="function" if begins else UNSET,
            function=FunctionObject(name=UNSET if piece.name is None else piece.name, arguments=piece.arguments),
        )

    def _finish(self, index: int, delta: Delta) -> "FinishReason | Literal['tool_calls'] | None":
        """As in OpenAI's API, a function that had to be called is no news."""
        reader = self._readers.get(index)
        is_called = reader is not None and reader.num_calls > 0 and delta.finish is FinishReason.STOP
        chose = self._tools is not None and self._tools.format is not CallFormat.ARGUMENTS
        return "tool_calls" if is_called and chose else delta.finish

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
