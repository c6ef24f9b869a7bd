"""How a call's answer is written, and all that another router needs to go on with it. Pure.

Kept in the bucket CALLS for calls that may be continued; the tokens themselves are in the token log.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace_router.choices import ChoiceText
from headrace_router.models import ServedModel
from headrace_router.prompt import Prompt
from headrace_router.tools import ToolUse
from headrace_router.validation import ValidParams
from headrace_shared.messages import Request, RequestId, StopParams


class AnswerForm(Struct, frozen=True, kw_only=True):
    """What the client gets to see."""

    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    skip_special_tokens: bool
    stop_strings: tuple[str, ...]
    include_stop: bool
    tools: ToolUse | None = None


class CallRecord(Struct, frozen=True, tag=True, kw_only=True):
    owner: str
    """Of whoever made the call; nobody else gets it."""
    created: int
    """Seconds since the epoch, as told to the client."""
    form: AnswerForm
    requests: tuple[Request, ...]
    """One for each prompt, without the prompt's tokens."""
    num_prompt_tokens: tuple[int, ...]
    stream_sequences: tuple[int, ...]
    """Of the queue messages."""

    @property
    def request_id(self) -> RequestId:
        """The first request's is that of the call."""
        return self.requests[0].request_id


def form_of(params: ValidParams, *, is_chat: bool) -> AnswerForm:
    return AnswerForm(
        is_chat=is_chat,
        stream=params.stream,
        include_usage=params.include_usage,
        continuous_usage=params.continuous_usage,
        skip_special_tokens=params.skip_special_tokens,
        stop_strings=params.stop_strings,
        include_stop=params.include_stop,
        tools=params.tools,
    )


def record_of(owner: str, created: int, form: AnswerForm, prompts: Sequence[Prompt]) -> CallRecord:
    """Of a call whose requests are queued."""
    return CallRecord(
        owner=owner,
        created=created,
        form=form,
        requests=tuple(msgspec.structs.replace(prompt.request, prompt=b"") for prompt in prompts),
        num_prompt_tokens=tuple(prompt.num_tokens for prompt in prompts),
        stream_sequences=tuple(prompt.stream_sequence or 0 for prompt in prompts),
    )


def prompts_of(record: CallRecord, model: ServedModel) -> list[Prompt]:
    """At the beginning of their answers."""
    prompts = []
    for request, num_tokens, sequence in zip(
        record.requests, record.num_prompt_tokens, record.stream_sequences, strict=True
    ):
        choices = [new_choice(record.form, request.stop, model) for _ in range(request.num_choices)]
        prompt = Prompt(request, choices, num_tokens)
        prompt.stream_sequence = sequence or None
        prompts.append(prompt)
    return prompts


def new_choice(form: AnswerForm, stop: StopParams, model: ServedModel) -> ChoiceText:
    return ChoiceText(
        model.encoder.vocabulary,
        skip_special=form.skip_special_tokens,
        stops=form.stop_strings,
        include_stop=form.include_stop,
        min_tokens=stop.min_tokens,
        eos_token_ids=model.card.eos_token_ids,
    )
