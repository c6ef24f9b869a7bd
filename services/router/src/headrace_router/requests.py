"""A valid call to the requests that go into the queue. The CPU-heavy part, tokenizing, is `encode_*`, for a thread."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from headrace_router.call_record import AnswerForm, Dialect, new_choice
from headrace_router.identity import Identity
from headrace_router.logprobs_wanted import check_scores
from headrace_router.long_texts import MAX_CHARS, Encode, Tail, TooManyTokens, check_count, encode_tail
from headrace_router.models import ServedModel
from headrace_router.prompt import Prompt
from headrace_router.templates import MAX_MARK_CHARS
from headrace_router.token_rules import check_some_left
from headrace_router.valid_chat import ValidChat
from headrace_router.validation import CONTEXT_EXCEEDED, ValidParams, context_exceeded, fit
from headrace_shared.codec import pack_ids, unpack_ids
from headrace_shared.errors import InvalidRequest, PayloadTooLarge
from headrace_shared.message_sizes import largest_message, most_tokens
from headrace_shared.messages import Audience, Lane, Request, RequestId, RouterId, StopParams


class EncodedPrompt(NamedTuple):
    ids: bytes
    """Packed."""
    stop: StopParams
    text: str = ""
    """What the answer begins with, where it echoes."""


MAX_SHORTENED = 16
"""A prompt that is cut to what fits may be so many times as long."""
MAX_RENDERED = 2
"""A chat may be so many times as long when it is rendered, where it is very long."""
MAX_COUNTED = 400_000
"""Tokens of a prompt that is only counted, where the context is no longer than this."""


def chat_message(model: ServedModel, chat: ValidChat) -> bytes:
    """For the process that renders it. Raises InvalidRequest."""
    return model.encoder.chat.message(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        variables=chat.template_variables,
        tools=chat.tools,
        continues=chat.continues,
        max_chars=max_chars(model),
    )


def encode_chat(model: ServedModel, chat: ValidChat, text: bytes, params: ValidParams) -> list[EncodedPrompt]:
    """`text`: as rendered. Raises InvalidRequest."""
    ids = _ids_of(model.encoder.chat.ids, text.decode(), params, model, "messages").ids
    if params.adds_special:
        ids = model.encoder.with_bos(ids)
    echoed = chat.open_text if params.echo else ""
    return [_encoded(_shortened(ids, params, model), params, model, "messages", echoed)]


def encode_prompts(model: ServedModel, prompts: Sequence[str | list[int]], params: ValidParams) -> list[EncodedPrompt]:
    """Raises InvalidRequest."""
    encoded: list[EncodedPrompt] = []
    for number, prompt in enumerate(prompts):
        try:
            encoded.append(_encode_prompt(model, prompt, params))
        except InvalidRequest as error:
            raise error if len(prompts) == 1 else _of_one(error, number) from None
    if params.sampling.num_prompt_logprobs is not None:
        num_tokens = sum(len(one.ids) // 4 for one in encoded)
        check_scores(num_tokens, params.sampling.num_prompt_logprobs, "prompt")
    return encoded


def _encode_prompt(model: ServedModel, prompt: str | list[int], params: ValidParams) -> EncodedPrompt:
    if isinstance(prompt, str):
        check_length(model, len(prompt), params.max_tokens, "prompt", shortens=params.truncate_to is not None)
        encode = partial(model.encoder.encode, add_special_tokens=params.adds_special)
        ids, is_whole = _ids_of(encode, prompt, params, model, "prompt")
    else:
        ids, is_whole = _shortened(prompt, params, model), False
    text = ""
    if params.echo:
        text = prompt if isinstance(prompt, str) and is_whole else model.encoder.decode(ids)
    return _encoded(ids, params, model, "prompt", text)


def _of_one(error: InvalidRequest, number: int) -> InvalidRequest:
    """Says which of several prompts it is about."""
    message = error.message.replace("'prompt'", f"'prompt[{number}]'")
    message = message.replace("the prompt has", f"'prompt[{number}]' has")
    return InvalidRequest(message, param=error.param, code=error.code)


def encode_bad_words(model: ServedModel, params: ValidParams) -> tuple[tuple[int, ...], ...]:
    """As tokens, at the beginning of a text and behind a blank. Raises InvalidRequest."""
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(model.encoder.encode(text, add_special_tokens=False))
            # What is beyond the logits is never drawn.
            if ids and max(ids) < model.card.vocab_size:
                words[ids] = None
    stop_ids = params.stop_token_ids if params.min_tokens else ()
    check_some_left(list(words), stop_ids, unpack_ids(params.sampling.allowed_token_ids), model.card)
    return tuple(words)


def count_ids(encode: Encode, text: str, model: ServedModel, param: str) -> list[int]:
    """Of a prompt without an answer, which may be longer than the context. Raises InvalidRequest."""
    context = model.card.context
    _check_count(encode, text, max(context, min(MAX_SHORTENED * context, MAX_COUNTED)), model, None, param)
    return encode(text)


def _ids_of(encode: Encode, text: str, params: ValidParams, model: ServedModel, param: str) -> Tail:
    """As many as are used; of a text that cannot fit not all is encoded. Raises InvalidRequest."""
    most = _most(params, model)
    if most is not None:
        return encode_tail(encode, text, most)
    _check_count(encode, text, model.card.context, model, params.max_tokens, param)
    return Tail(encode(text), is_whole=True)


def _check_count(encode: Encode, text: str, most: int, model: ServedModel, max_tokens: int | None, param: str) -> None:
    try:
        check_count(encode, text, most)
    except TooManyTokens as error:
        shown = f"at least {error.num_tokens}"
        raise context_exceeded(model.card.context, shown, error.num_tokens, max_tokens, param) from None
    _check_chars(len(text), param)


def _shortened(ids: list[int], params: ValidParams, model: ServedModel) -> list[int]:
    most = _most(params, model)
    return ids if most is None else ids[-most:]


def _most(params: ValidParams, model: ServedModel) -> int | None:
    """Tokens of the prompt that are used; None: it is not cut."""
    if params.truncate_to is None:
        return None
    return params.truncate_to or max(1, model.card.context - (params.max_tokens or 1))


def _encoded(ids: Sequence[int], params: ValidParams, model: ServedModel, param: str, text: str) -> EncodedPrompt:
    stop = fit(len(ids), params, model.card, param)
    if (highest := max(ids)) >= model.card.vocab_size:
        # Tokenizers may know tokens (of images, say) that the model has no embedding for.
        raise InvalidRequest(f"'{param}' yields the token {highest}, which this model does not have.", param=param)
    return EncodedPrompt(pack_ids(ids), stop, text)


class Terms(NamedTuple):
    """Under which a call's requests are queued."""

    request_id: RequestId
    """Of the call, and of its first request."""
    router: RouterId
    trace: dict[str, str]
    audience: Audience
    timeout_s: float
    identity: Identity
    lane: Lane
    shares_cache: bool
    """Cached prompts are shared by all tenants."""


def make_prompts(
    encoded: Sequence[EncodedPrompt],
    params: ValidParams,
    form: AnswerForm,
    model: ServedModel,
    terms: Terms,
    max_payload: int,
) -> list[Prompt]:
    """Raises PayloadTooLarge if the messages about a request could exceed `max_payload` bytes."""
    prompts = []
    for number, (ids, stop, _) in enumerate(encoded):
        # Equal prompts of one call are different draws, unless the client wants them to be equal.
        seed = params.sampling.seed if params.has_seed else (params.sampling.seed + number) & (2**63 - 1)
        sampling = msgspec.structs.replace(params.sampling, seed=seed)
        request = Request(
            request_id=request_id_of(terms.request_id, number),
            router=terms.router,
            model=model.card.model,
            prompt=ids,
            sampling=sampling,
            stop=stop,
            num_choices=params.num_choices,
            lane=terms.lane,
            tenant=terms.identity.tenant,
            cache_salt=terms.identity.cache_salt(params.cache_salt, is_shared=terms.shares_cache),
            trace=terms.trace,
            audience=terms.audience,
            timeout_s=terms.timeout_s,
            priority=terms.identity.priority,
            weight=terms.identity.weight,
            adapter="" if model.adapter is None else model.adapter.name,
            adapter_digest="" if model.adapter is None else model.adapter.digest,
            embeds=form.dialect is Dialect.EMBEDDINGS,
        )
        request = _sized(request, params, max_payload)
        choices = [new_choice(form, stop, model) for _ in range(params.num_choices)]
        prompts.append(Prompt(request, choices, flow=terms.identity.flow, cache_key=params.cache_key))
    return prompts


def request_id_of(call: RequestId, number: int) -> RequestId:
    """Of the call's prompt with this number: the same wherever it is derived, and as hard to guess as the call's."""
    return call if number == 0 else RequestId(hashlib.sha256(f"{call}/{number}".encode()).hexdigest()[:32])


def _sized(request: Request, params: ValidParams, max_payload: int) -> Request:
    """The answer is shortened to what can be carried only where the client left its length to us."""
    size = largest_message(request)
    if size <= max_payload:
        return request
    max_tokens = most_tokens(request, max_payload)
    if params.max_tokens is not None or max_tokens < max(1, request.stop.min_tokens):
        raise PayloadTooLarge(size, max_payload)
    return msgspec.structs.replace(request, stop=msgspec.structs.replace(request.stop, max_tokens=max_tokens))


def check_chat_length(model: ServedModel, chat: ValidChat, max_tokens: int | None, *, shortens: bool = False) -> None:
    num_chars = sum(len(message["content"]) for message in chat.messages)
    num_chars += sum(len(json.dumps(tool, ensure_ascii=False)) for tool in chat.tools)
    check_length(model, num_chars, max_tokens, "messages", shortens=shortens)
    # The process that renders it, and the pipes to it, hold it several times over.
    _check_chars(num_chars, "messages")


def check_length(
    model: ServedModel, num_chars: int, max_tokens: int | None, param: str, *, shortens: bool = False
) -> None:
    """Texts that cannot fit by far are not tokenized, which would take seconds. `shortens`: it will be cut."""
    fewest = model.encoder.fewest_tokens(num_chars)
    if fewest > model.card.context * (MAX_SHORTENED if shortens else 1):
        raise context_exceeded(model.card.context, f"at least {fewest}", fewest, max_tokens, param)


def _check_chars(num_chars: int, param: str) -> None:
    if num_chars > MAX_CHARS:
        message = f"'{param}' has {num_chars} characters; at most {MAX_CHARS} are tokenized."
        raise InvalidRequest(message, param=param, code=CONTEXT_EXCEEDED)


def max_chars(model: ServedModel) -> int:
    """No chat that fits into the context, or is cut to fit, is longer when it is rendered."""
    most = MAX_SHORTENED * model.card.context * (MAX_MARK_CHARS + model.encoder.max_chars_per_token)
    return min(most, MAX_RENDERED * MAX_CHARS)
