"""A body to a valid generation, or an InvalidRequest that names the field. Pure.

Everything is checked here, against the model's card, before anything is tokenized; `fit` then checks the prompt's
length. Nothing behind this checks again.
"""

from typing import Any, NamedTuple

import msgspec

from headrace_router.call_limits import (
    MAX_CHOICES,
    MAX_PENALTY,
    MAX_PROMPTS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_SEQUENCES,
    MAX_STREAM_INTERVAL,
    MAX_TEMPERATURE,
)
from headrace_router.client_fields import check_client_fields, salt_of
from headrace_router.logprobs_wanted import LogprobsWanted, chat_logprobs, check_scores, completion_logprobs
from headrace_router.ranges import check_range, short
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.structured_output import OutputForm, output_form
from headrace_router.token_rules import (
    allowed_tokens,
    bad_words,
    check_ids,
    logit_bias,
    stop_strings,
    stop_tokens,
)
from headrace_router.tools import ToolUse, tools_of
from headrace_router.unsupported import refuse_unsupported
from headrace_router.valid_chat import ValidChat, chat_of
from headrace_shared.codec import pack_ids
from headrace_shared.errors import InvalidRequest
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.messages import SamplingParams, StopParams

CONTEXT_EXCEEDED = "context_length_exceeded"
DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-4
"""Sampling at this temperature or below picks the likeliest token; dividing logits by less overflows."""
LEAST_REPETITION_PENALTY = 1e-6
"""With this or less the likeliest of the tokens that were there before comes again; the same holds for it."""


class ValidParams(NamedTuple):
    """Parameters of a generation; all in range."""

    sampling: SamplingParams
    has_seed: bool
    """The client gave one: equal prompts give equal answers."""
    num_choices: int
    max_tokens: int | None
    """As the client gave it."""
    default_max_tokens: int | None
    """Used, as far as the context reaches, when the client gave none; None: the whole context."""
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    cache_salt: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    is_background: bool
    form: OutputForm | None
    """Of the answer; not known yet to make sense."""
    tools: ToolUse | None
    """How the answer's function calls are found; None: there are none."""
    echo: bool
    """The answer begins with the prompt's text; a chat's with that of a last message of the assistant."""
    echo_logprobs: int | None
    """Log-probabilities are wanted of the echoed tokens too, with so many of the likeliest."""
    prompt_logprobs: int | None
    """Wanted of the prompt's tokens, beside the answer."""
    returns_ids: bool
    truncate_to: int | None
    """Tokens of the prompt that are used, the last ones; 0: as many as fit."""
    stream_interval: int
    bad_words: tuple[str, ...]
    """Not tokenized yet."""
    cache_key: str
    adds_special: bool
    """The tokenizer's own special tokens are added to the prompt."""
    asks_tier: bool
    """The answer is to tell the service tier."""


def validate_chat(body: ChatBody, card: ModelCard, random_seed: int) -> tuple[ValidChat, ValidParams]:
    refuse_unsupported(body.model_extra or {}, num_choices=body.n)
    tools = tools_of(body, card.chat_template or "")
    chat = chat_of(body, card.chat_template or "", tools.described)
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _validate(body, card, random_seed, chat_logprobs(body, card), field, max_tokens, default_max_tokens=None)
    if tools.form is not None and params.form is not None:
        raise InvalidRequest("'tool_choice' cannot be combined with a form of the answer.", param="tool_choice")
    params = params._replace(tools=tools.use, form=tools.form or params.form)
    _check_form(params, card)
    return chat, params


def validate_completion(
    body: CompletionBody, card: ModelCard, random_seed: int
) -> tuple[list[str] | list[list[int]], ValidParams]:
    """The prompts, as given: texts or token ids."""
    refuse_unsupported(body.model_extra or {}, num_choices=body.n)
    prompts = _prompts(body.prompt, card)
    default = DEFAULT_COMPLETION_TOKENS
    wanted = completion_logprobs(body, card)
    params = _validate(body, card, random_seed, wanted, "max_tokens", body.max_tokens, default_max_tokens=default)
    _check_form(params, card)
    if len(prompts) * params.num_choices > MAX_SEQUENCES:
        raise InvalidRequest(f"Prompts times 'n' must be at most {MAX_SEQUENCES}.", param="n")
    return prompts, params


def fit(num_prompt_tokens: int, params: ValidParams, card: ModelCard, param: str) -> StopParams:
    """What ends the answer to a prompt of this length. Raises InvalidRequest if the prompt is empty or too long."""
    if num_prompt_tokens < 1:
        raise InvalidRequest(f"'{param}' must yield at least one token.", param=param, code="empty_prompt")
    if num_prompt_tokens >= card.context or num_prompt_tokens + (params.max_tokens or 1) > card.context:
        raise context_exceeded(card.context, f"{num_prompt_tokens}", num_prompt_tokens, params.max_tokens, param)
    room = card.context - num_prompt_tokens
    max_tokens = min(room, params.default_max_tokens or room) if params.max_tokens is None else params.max_tokens or 1
    check_scores(num_prompt_tokens, params.sampling.num_prompt_logprobs, param)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(f"'min_tokens' must be at most {max_tokens}.", param="min_tokens")
    return StopParams(max_tokens=max_tokens, min_tokens=params.min_tokens, stop_token_ids=params.stop_token_ids)


def context_exceeded(
    context: int, shown: str, num_prompt_tokens: int, max_tokens: int | None, param: str
) -> InvalidRequest:
    wanted = "at least 1 token is needed for an answer" if not max_tokens else f"{max_tokens} tokens were requested"
    if max_tokens == 1:
        wanted = "1 token was requested"
    total = num_prompt_tokens + (max_tokens or 1)
    message = (
        f"This model's maximum context length is {context} tokens. However, the prompt has {shown} tokens and "
        f"{wanted}, {total} in total."
    )
    return InvalidRequest(message, param=param, code=CONTEXT_EXCEEDED)


def _validate(
    body: GenerationBody,
    card: ModelCard,
    random_seed: int,
    logprobs: LogprobsWanted,
    max_tokens_field: str,
    max_tokens: int | None,
    *,
    default_max_tokens: int | None,
) -> ValidParams:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if max_tokens is not None:
        # Nothing but the prompt's log-probabilities, or its text, is wanted then.
        if max_tokens < (0 if body.echo and isinstance(body, CompletionBody) else 1):
            raise InvalidRequest(f"'{max_tokens_field}' must be at least 1.", param=max_tokens_field)
        if max_tokens > card.context:
            raise InvalidRequest(
                f"'{max_tokens_field}' of {short(max_tokens)} exceeds this model's maximum context length of "
                f"{card.context} tokens.",
                param=max_tokens_field,
                code=CONTEXT_EXCEEDED,
            )
    num_choices = 1 if body.n is None else body.n
    check_range("n", num_choices, 1, MAX_CHOICES)
    min_tokens = body.min_tokens or 0
    check_range("min_tokens", min_tokens, 0, max_tokens if max_tokens is not None else card.context)
    interval = 1 if body.stream_interval is None else body.stream_interval
    check_range("stream_interval", interval, 1, MAX_STREAM_INTERVAL)
    if logprobs.of_echo is not None and body.stream and num_choices > 1:
        raise InvalidRequest("'echo' with 'logprobs' cannot be streamed with 'n' above 1.", param="n")
    check_client_fields(body)
    eos = () if body.ignore_eos else card.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *stop_tokens(body.stop_token_ids, card))))
    allowed = allowed_tokens(body.allowed_token_ids, card, stop_ids if min_tokens else ())
    sampling = _sampling(body, card, random_seed, logprobs)
    return ValidParams(
        sampling=msgspec.structs.replace(sampling, allowed_token_ids=pack_ids(allowed)),
        has_seed=body.seed is not None,
        num_choices=num_choices,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        stop_strings=stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=salt_of(body),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        is_background=bool(body.background),
        form=output_form(body),
        tools=None,
        echo=bool(body.echo),
        echo_logprobs=logprobs.of_echo,
        prompt_logprobs=logprobs.of_prompt,
        returns_ids=bool(body.return_token_ids),
        truncate_to=_truncate_to(body.truncate_prompt_tokens, card),
        stream_interval=interval,
        bad_words=bad_words(body.bad_words),
        cache_key=body.prompt_cache_key or "",
        adds_special=_first(body.add_special_tokens, isinstance(body, CompletionBody)),
        asks_tier=body.service_tier is not None,
    )


def _truncate_to(given: int | None, card: ModelCard) -> int | None:
    if given is None or given == -1:
        return None if given is None else 0
    if not 1 <= given <= card.context:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' must be -1 or from 1 to {card.context}, not {short(given)}.",
            param="truncate_prompt_tokens",
        )
    return given


def _check_form(params: ValidParams, card: ModelCard) -> None:
    """A form and other rules about tokens might leave none; and some workers keep no such rules."""
    if not card.constrained_decoding:
        _refuse_constraints(params)
    if params.form is not None and params.sampling.allowed_token_ids:
        raise InvalidRequest(
            f"'allowed_token_ids' cannot be combined with '{params.form.param}'.", param="allowed_token_ids"
        )
    if params.form is not None and params.bad_words:
        raise InvalidRequest(f"'bad_words' cannot be combined with '{params.form.param}'.", param="bad_words")


def _refuse_constraints(params: ValidParams) -> None:
    form = params.form.param if params.form is not None else None
    given = (("allowed_token_ids", params.sampling.allowed_token_ids), ("bad_words", params.bad_words))
    param = form or next((name for name, value in given if value), None)
    if param is not None:
        raise InvalidRequest(
            f"'{param}' is not supported by this model: its answers can be held to no form and to no tokens.",
            param=param,
            code="unsupported_parameter",
        )


def _sampling(body: GenerationBody, card: ModelCard, random_seed: int, logprobs: LogprobsWanted) -> SamplingParams:
    """Given by the client, else by the model's generation config, else OpenAI's default."""
    temperature = _first(body.temperature, card.temperature, 1.0)
    top_k = _first(body.top_k, card.top_k, 0)
    top_p = _first(body.top_p, card.top_p, 1.0)
    min_p = _first(body.min_p, 0.0)
    repetition = _first(body.repetition_penalty, card.repetition_penalty, 1.0)
    presence = _first(body.presence_penalty, 0.0)
    frequency = _first(body.frequency_penalty, 0.0)
    check_range("temperature", temperature, 0.0, MAX_TEMPERATURE)
    check_range("top_k", top_k, -1, MAX_SEED)
    check_range("top_p", top_p, 0.0, 1.0, above_low=True)
    check_range("min_p", min_p, 0.0, 1.0)
    check_range("repetition_penalty", repetition, 0.0, MAX_REPETITION_PENALTY, above_low=True)
    check_range("presence_penalty", presence, -MAX_PENALTY, MAX_PENALTY)
    check_range("frequency_penalty", frequency, -MAX_PENALTY, MAX_PENALTY)
    if body.seed is not None:
        check_range("seed", body.seed, -MAX_SEED - 1, MAX_SEED)
    return SamplingParams(
        seed=(random_seed if body.seed is None else body.seed) & MAX_SEED,
        temperature=0.0 if temperature <= GREEDY_BELOW else float(temperature),
        top_k=0 if top_k <= 0 or top_k >= card.vocab_size else int(top_k),
        top_p=float(top_p),
        min_p=float(min_p),
        repetition_penalty=max(float(repetition), LEAST_REPETITION_PENALTY),
        presence_penalty=float(presence),
        frequency_penalty=float(frequency),
        logit_bias=logit_bias(body.logit_bias or {}, card),
        num_logprobs=logprobs.of_output,
        num_prompt_logprobs=logprobs.of_any_prompt,
        logprob_token_ids=logprobs.named,
    )


def _prompts(given: str | list[str] | list[int] | list[list[int]], card: ModelCard) -> list[str] | list[list[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("'prompt' must not be empty.", param="prompt", code="empty_array")
    if isinstance(given[0], int):
        given = [given]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"'prompt' may have at most {MAX_PROMPTS} prompts.", param="prompt")
    for prompt in given:
        if isinstance(prompt, list):
            check_ids("prompt", prompt, card)
    return given


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
