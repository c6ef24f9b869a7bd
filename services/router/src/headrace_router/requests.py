"""A valid call to the requests that go into the queue. The CPU-heavy part, rendering and tokenizing, is `encode_*`,
for a thread."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace_router.choices import ChoiceText
from headrace_router.models import ServedModel
from headrace_router.prompt import Prompt
from headrace_router.validation import ValidChat, ValidParams, context_exceeded, fit
from headrace_shared.codec import pack_ids
from headrace_shared.errors import PayloadTooLarge
from headrace_shared.message_sizes import largest_message, most_tokens
from headrace_shared.messages import Request, RequestId, RouterId, StopParams


class EncodedPrompt(NamedTuple):
    ids: bytes
    """Packed."""
    stop: StopParams


def encode_chat(model: ServedModel, chat: ValidChat, params: ValidParams) -> list[EncodedPrompt]:
    """Raises InvalidRequest."""
    num_chars = sum(len(message["content"]) for message in chat.messages)
    check_length(model, num_chars, params.max_tokens, "messages")
    ids = model.encoder.encode_chat(
        chat.messages, add_generation_prompt=chat.add_generation_prompt, variables=chat.template_variables
    )
    return [EncodedPrompt(pack_ids(ids), fit(len(ids), params, model.card, "messages"))]


def encode_prompts(
    model: ServedModel, prompts: list[str] | list[list[int]], params: ValidParams
) -> list[EncodedPrompt]:
    """Raises InvalidRequest."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(model, len(prompt), params.max_tokens, "prompt")
        ids = model.encoder.encode(prompt) if isinstance(prompt, str) else prompt
        encoded.append(EncodedPrompt(pack_ids(ids), fit(len(ids), params, model.card, "prompt")))
    return encoded


def make_prompts(
    encoded: Sequence[EncodedPrompt],
    params: ValidParams,
    model: ServedModel,
    router: RouterId,
    trace: dict[str, str],
    new_id: Callable[[], RequestId],
    max_payload: int,
) -> list[Prompt]:
    """Raises PayloadTooLarge if the messages about a request could exceed `max_payload` bytes."""
    prompts = []
    for number, (ids, stop) in enumerate(encoded):
        # Equal prompts of one call are different draws, unless the client wants them to be equal.
        seed = params.sampling.seed if params.has_seed else (params.sampling.seed + number) & (2**63 - 1)
        sampling = msgspec.structs.replace(params.sampling, seed=seed)
        request = Request(
            request_id=new_id(),
            router=router,
            model=model.card.model,
            prompt=ids,
            sampling=sampling,
            stop=stop,
            num_choices=params.num_choices,
            cache_salt=params.cache_salt,
            trace=trace,
        )
        request = _sized(request, params, max_payload)
        prompts.append(Prompt(request, [_choice(params, stop, model) for _ in range(params.num_choices)]))
    return prompts


def _sized(request: Request, params: ValidParams, max_payload: int) -> Request:
    """The answer is shortened to what can be carried only where the client left its length to us."""
    size = largest_message(request)
    if size <= max_payload:
        return request
    max_tokens = most_tokens(request, max_payload)
    if params.max_tokens is not None or max_tokens < max(1, request.stop.min_tokens):
        raise PayloadTooLarge(size, max_payload)
    return msgspec.structs.replace(request, stop=msgspec.structs.replace(request.stop, max_tokens=max_tokens))


def _choice(params: ValidParams, stop: StopParams, model: ServedModel) -> ChoiceText:
    return ChoiceText(
        model.encoder.vocabulary,
        skip_special=params.skip_special_tokens,
        stops=params.stop_strings,
        include_stop=params.include_stop,
        min_tokens=stop.min_tokens,
        eos_token_ids=model.card.eos_token_ids,
    )


def check_length(model: ServedModel, num_chars: int, max_tokens: int | None, param: str) -> None:
    """Texts that cannot fit by far are not tokenized, which would take seconds."""
    fewest = model.encoder.fewest_tokens(num_chars)
    if fewest > model.card.context:
        raise context_exceeded(model.card.context, f"at least {fewest}", fewest, max_tokens, param)
