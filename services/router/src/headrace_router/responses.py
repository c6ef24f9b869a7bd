"""The objects that clients get, as msgspec structs: encoding one chunk takes about a microsecond. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace_router.call_reader import CallReader
from headrace_router.call_record import AnswerForm
from headrace_router.call_sink import CallPiece, Found
from headrace_router.choices import ChoiceDelta, Delta, TokenText, Usage
from headrace_router.detokenization import Vocabulary
from headrace_router.logprob_objects import ChatLogprobs, CompletionLogprobs, LogprobWriter, PromptLogprobs
from headrace_router.shown_prompt import NOTHING, ShownPrompt
from headrace_router.tools import CallFormat
from headrace_shared.messages import FinishReason


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class UsageObject(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


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
    annotations: tuple[()] = ()
    tool_calls: list[ToolCallObject] | UnsetType = UNSET


class Choice(Struct, frozen=True):
    index: int
    delta: ChatDelta | UnsetType = UNSET
    message: ChatMessageObject | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Of completions: a call may have several prompts."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Answer(Struct, frozen=True):
    """A whole answer or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageObject | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Of chats."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Identity(NamedTuple):
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str


class Formatter:
    """Writes one answer. Its form is fixed; per-choice state is only whether the choice has begun, and where it stands
    in a function call."""

    def __init__(
        self,
        identity: Identity,
        vocabulary: Vocabulary,
        form: AnswerForm,
        *,
        num_logprobs: int | None,
        prompts: Sequence[ShownPrompt] = (),
        num_choices: int = 1,
    ) -> None:
        """`prompts`: of the call, where the answer shows something of them; `num_choices` of each."""
        self._identity = identity
        self._form = form
        self._readers: dict[int, CallReader] = {}
        self._vocabulary = vocabulary
        self._is_chat = form.is_chat
        self._has_logprobs = num_logprobs is not None
        self._writer = LogprobWriter(vocabulary, num_logprobs or 0)
        self._prompts = prompts
        self._num_choices = num_choices
        self._tier: str | UnsetType = form.service_tier or UNSET
        self._begun: set[int] = set()

    @property
    def model(self) -> str:
        return self._identity.model

    def chunk(self, event: ChoiceDelta, usage: UsageObject | UnsetType | None) -> Answer | None:
        """None if there is nothing to say: no text, because it is held back, and no end."""
        index, delta = event.choice, event.delta
        is_first = index not in self._begun
        if not (delta.text or delta.tokens or delta.token_ids or delta.finish) and not is_first:
            return None
        self._begun.add(index)
        shown = self._shown(index) if is_first else NOTHING
        logprobs = self._logprobs(self._placed(index, delta.tokens, is_first=is_first))
        ids = list(delta.token_ids) if self._form.returns_ids else UNSET
        if self._is_chat:
            found = self._read(index, delta)
            calls = [self._call(index, piece, is_chunk=True) for piece in found.calls]
            text = shown.text + found.text
            if not (text or calls or delta.tokens or delta.token_ids or delta.finish) and not is_first:
                return None
            role = "assistant" if is_first else UNSET
            content = text if text or (is_first and not calls) else UNSET
            choice = Choice(
                index,
                delta=ChatDelta(role, content, calls or UNSET),
                logprobs=logprobs,
                finish_reason=self._finish(index, delta),
                stop_reason=delta.stop_reason,
                token_ids=ids,
            )
            prompt_ids = self._prompt_ids(shown) if is_first else UNSET
            return self._answer("chat.completion.chunk", [choice], usage, prompt_token_ids=prompt_ids)
        choice = Choice(
            index,
            text=shown.text + delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish,
            stop_reason=delta.stop_reason,
            token_ids=ids,
            prompt_token_ids=self._prompt_ids(shown) if is_first else UNSET,
        )
        return self._answer("text_completion", [choice], usage)

    def usage_chunk(self, usage: UsageObject) -> Answer:
        return self._answer("chat.completion.chunk" if self._is_chat else "text_completion", [], usage)

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: UsageObject) -> Answer:
        """`deltas[i]` are all deltas of choice i."""
        choices = []
        for index, parts in enumerate(deltas):
            text = "".join(part.text for part in parts)
            tokens = [token for part in parts for token in part.tokens]
            logprobs = self._logprobs(self._placed(index, tokens, is_first=True))
            ids = [token for part in parts for token in part.token_ids] if self._form.returns_ids else UNSET
            shown = self._shown(index)
            end = parts[-1]
            if self._is_chat:
                found = self._read(index, end._replace(text=text))
                calls = [self._call(index, piece, is_chunk=False) for piece in found.calls]
                said = shown.text + found.text
                choices.append(
                    Choice(
                        index,
                        message=ChatMessageObject(said if said or not calls else None, tool_calls=calls or UNSET),
                        logprobs=logprobs,
                        finish_reason=self._finish(index, end),
                        stop_reason=end.stop_reason,
                        token_ids=ids,
                    )
                )
            else:
                choices.append(
                    Choice(
                        index,
                        text=shown.text + text,
                        logprobs=logprobs,
                        finish_reason=end.finish,
                        stop_reason=end.stop_reason,
                        token_ids=ids,
                        prompt_token_ids=self._prompt_ids(shown),
                        prompt_logprobs=self._prompt_logprobs(shown),
                    )
                )
        if not self._is_chat:
            return self._answer("text_completion", choices, usage)
        only = self._shown(0)
        return self._answer(
            "chat.completion",
            choices,
            usage,
            prompt_token_ids=self._prompt_ids(only),
            prompt_logprobs=self._prompt_logprobs(only),
        )

    def _read(self, index: int, delta: Delta) -> Found:
        if self._form.tools is None:
            return Found(delta.text)
        reader = self._readers.setdefault(index, CallReader(self._form.tools))
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
        tools = self._form.tools
        chose = tools is not None and tools.format is not CallFormat.ARGUMENTS
        return "tool_calls" if is_called and chose else delta.finish

    def _answer(
        self,
        kind: str,
        choices: list[Choice],
        usage: UsageObject | UnsetType | None,
        *,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        prompt_logprobs: PromptLogprobs | UnsetType = UNSET,
    ) -> Answer:
        identity = self._identity
        return Answer(
            identity.id,
            kind,
            identity.created,
            identity.model,
            choices,
            usage,
            self._tier,
            prompt_token_ids,
            prompt_logprobs,
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> ChatLogprobs | CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        return self._writer.of_chat(tokens) if self._is_chat else self._writer.of_completion(tokens)

    def _shown(self, index: int) -> ShownPrompt:
        """Of the prompt that the choice answers."""
        return self._prompts[index // self._num_choices] if self._prompts else NOTHING

    def _placed(self, index: int, tokens: Sequence[TokenText], *, is_first: bool) -> Sequence[TokenText]:
        """Tokens of a choice where they are in the text that is shown, the first ones behind those of the prompt."""
        shown = self._shown(index)
        if shown.text:
            tokens = [token._replace(start=token.start + len(shown.text)) for token in tokens]
        if is_first and self._form.echo_logprobs is not None:
            return [*shown.tokens(self._vocabulary), *tokens]
        return tokens

    def _prompt_logprobs(self, shown: ShownPrompt) -> PromptLogprobs | UnsetType:
        wanted = self._form.prompt_logprobs
        return UNSET if wanted is None else self._writer.of_prompt(shown.ids, shown.scores, wanted)

    def _prompt_ids(self, shown: ShownPrompt) -> list[int] | UnsetType:
        return list(shown.ids) if self._form.returns_ids else UNSET


def usage_object(usage: Usage) -> UsageObject:
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=CachedTokens(usage.cached_tokens),
    )


_encode = msgspec.json.Encoder().encode


def to_json(answer: Struct | dict[str, Any]) -> bytes:
    return _encode(answer)
