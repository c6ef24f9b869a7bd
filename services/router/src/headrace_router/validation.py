"""A body to a valid generation, or an InvalidRequest that names the field. Pure.

Everything is checked here, against the model's card, before anything is tokenized; `fit` then checks the prompt's
length. Nothing behind this checks again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_router.chat_messages import template_messages
from headrace_router.chat_template import RESERVED_NAMES
from headrace_router.schemas import ChatBody, CompletionBody, GenerationBody
from headrace_router.structured_output import OutputForm, output_form
from headrace_router.tool_prompt import with_tools
from headrace_router.tools import ToolUse, tools_of
from headrace_router.unsupported import refuse_unsupported
from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import ModelCard, SamplingParams, StopParams

MAX_CHOICES = 16
MAX_PROMPTS = 128
MAX_SEQUENCES = 256
"""prompts x choices of one call."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_USER_CHARS = 1024
MAX_METADATA_BYTES = 16 * 1024
MAX_SALT_CHARS = 128
DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-4
"""Sampling at this temperature or below picks the likeliest token; dividing logits by less overflows."""
_MAX_SEED = 2**63 - 1


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


class ValidChat(NamedTuple):
    messages: list[dict[str, Any]]
    """As a chat template takes them."""
    add_generation_prompt: bool
    template_variables: dict[str, Any]
    tools: list[dict[str, Any]]
    """Described for the template; empty: none."""
    continues: bool
    """The answer goes on with the last message, which is the assistant's."""


def validate_chat(body: ChatBody, card: ModelCard, random_seed: int) -> tuple[ValidChat, ValidParams]:
    refuse_unsupported(body.model_extra or {}, num_choices=body.n)
    if not body.messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages", code="empty_array")
    if body.top_logprobs is not None:
        _check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not body.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequest(
                "'continue_final_message' cannot be combined with 'add_generation_prompt'.",
                param="continue_final_message",
            )
        last = body.messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            raise InvalidRequest(
                "'continue_final_message' needs a last message with the assistant's text.",
                param="continue_final_message",
            )
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_NAMES or name.startswith("_"):
            param = "chat_template_kwargs"
            raise InvalidRequest(f"'{param}' may not set '{name[:64]}'.", param=param)
    template = card.chat_template or ""
    tools = tools_of(body, template)
    messages = template_messages(body.messages)
    knows_tools = "tools" in template
    chat = ValidChat(
        messages=messages if knows_tools else with_tools(messages, tools.described),
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        template_variables=variables,
        tools=tools.described if knows_tools else [],
        continues=bool(body.continue_final_message),
    )
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _validate(body, card, random_seed, num_logprobs, field, max_tokens, default_max_tokens=None)
    if tools.form is not None and params.form is not None:
        raise InvalidRequest("'tool_choice' cannot be combined with a form of the answer.", param="tool_choice")
    return chat, params._replace(tools=tools.use, form=tools.form or params.form)


def validate_completion(
    body: CompletionBody, card: ModelCard, random_seed: int
) -> tuple[list[str] | list[list[int]], ValidParams]:
    """The prompts, as given: texts or token ids."""
    refuse_unsupported(body.model_extra or {}, num_choices=body.n)
    prompts = _prompts(body.prompt, card)
    if body.logprobs is not None:
        _check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    default = DEFAULT_COMPLETION_TOKENS
    params = _validate(
        body, card, random_seed, body.logprobs, "max_tokens", body.max_tokens, default_max_tokens=default
    )
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
    max_tokens = params.max_tokens or min(room, params.default_max_tokens or room)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(f"'min_tokens' must be at most {max_tokens}.", param="min_tokens")
    return StopParams(max_tokens=max_tokens, min_tokens=params.min_tokens, stop_token_ids=params.stop_token_ids)


def context_exceeded(
    context: int, shown: str, num_prompt_tokens: int, max_tokens: int | None, param: str
) -> InvalidRequest:
    requested = f"{max_tokens} tokens" if max_tokens is not None else "at least 1 token"
    total = num_prompt_tokens + (max_tokens or 1)
    message = (
        f"This model's maximum context length is {context} tokens. However, the prompt has {shown} tokens and "
        f"{requested} were requested, {total} in total."
    )
    return InvalidRequest(message, param=param, code="context_length_exceeded")


def _validate(
    body: GenerationBody,
    card: ModelCard,
    random_seed: int,
    num_logprobs: int | None,
    max_tokens_field: str,
    max_tokens: int | None,
    *,
    default_max_tokens: int | None,
) -> ValidParams:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
    if max_tokens is not None:
        if max_tokens < 1:
            raise InvalidRequest(f"'{max_tokens_field}' must be at least 1.", param=max_tokens_field)
        if max_tokens > card.context:
            raise InvalidRequest(
                f"'{max_tokens_field}' of {_short(max_tokens)} exceeds this model's maximum context length of "
                f"{card.context} tokens.",
                param=max_tokens_field,
                code="context_length_exceeded",
            )
    num_choices = 1 if body.n is None else body.n
    _check_range("n", num_choices, 1, MAX_CHOICES)
    min_tokens = body.min_tokens or 0
    _check_range("min_tokens", min_tokens, 0, max_tokens if max_tokens is not None else card.context)
    _check_identity(body)
    stop_ids = _token_ids("stop_token_ids", body.stop_token_ids or [], card, MAX_STOP_TOKENS)
    eos = () if body.ignore_eos else card.eos_token_ids
    return ValidParams(
        sampling=_sampling(body, card, random_seed, num_logprobs),
        has_seed=body.seed is not None,
        num_choices=num_choices,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(dict.fromkeys((*eos, *stop_ids))),
        stop_strings=_stop_strings(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=_salt(body.cache_salt),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        is_background=bool(body.background),
        form=output_form(body),
        tools=None,
    )


def _sampling(body: GenerationBody, card: ModelCard, random_seed: int, num_logprobs: int | None) -> SamplingParams:
    """Given by the client, else by the model's generation config, else OpenAI's default."""
    temperature = _first(body.temperature, card.temperature, 1.0)
    top_k = _first(body.top_k, card.top_k, 0)
    top_p = _first(body.top_p, card.top_p, 1.0)
    min_p = _first(body.min_p, 0.0)
    repetition = _first(body.repetition_penalty, card.repetition_penalty, 1.0)
    presence = _first(body.presence_penalty, 0.0)
    frequency = _first(body.frequency_penalty, 0.0)
    _check_range("temperature", temperature, 0.0, 2.0)
    _check_range("top_k", top_k, -1, _MAX_SEED)
    _check_range("top_p", top_p, 0.0, 1.0, above_low=True)
    _check_range("min_p", min_p, 0.0, 1.0)
    _check_range("repetition_penalty", repetition, 0.0, 10.0, above_low=True)
    _check_range("presence_penalty", presence, -2.0, 2.0)
    _check_range("frequency_penalty", frequency, -2.0, 2.0)
    if body.seed is not None:
        _check_range("seed", body.seed, -_MAX_SEED - 1, _MAX_SEED)
    return SamplingParams(
        seed=(random_seed if body.seed is None else body.seed) & _MAX_SEED,
        temperature=0.0 if temperature <= GREEDY_BELOW else float(temperature),
        top_k=0 if top_k <= 0 or top_k >= card.vocab_size else int(top_k),
        top_p=float(top_p),
        min_p=float(min_p),
        repetition_penalty=float(repetition),
        presence_penalty=float(presence),
        frequency_penalty=float(frequency),
        logit_bias=_logit_bias(body.logit_bias or {}, card),
        num_logprobs=num_logprobs,
    )


def _logit_bias(given: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise InvalidRequest(f"'logit_bias' may have at most {MAX_BIASES} entries.", param="logit_bias")
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < card.vocab_size):
            raise InvalidRequest(
                f"'logit_bias' has the key '{key[:32]}', which is no token id from 0 to {card.vocab_size - 1}.",
                param="logit_bias",
            )
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest(
                f"'logit_bias' of token {key} must be from -100 to 100, not {_short(bias)}.", param="logit_bias"
            )
        biases[int(key)] = float(bias)
    return biases


def _stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' may have at most {MAX_STOPS} strings.", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"Each 'stop' string must have 1 to {MAX_STOP_CHARS} characters.", param="stop")
    return tuple(dict.fromkeys(stops))


def _token_ids(field: str, ids: Sequence[int], card: ModelCard, most: int) -> tuple[int, ...]:
    if len(ids) > most:
        raise InvalidRequest(f"'{field}' may have at most {most} token ids.", param=field)
    _check_ids(field, ids, card)
    return tuple(ids)


def _check_ids(field: str, ids: Sequence[int], card: ModelCard) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < card.vocab_size):
        bad = next(i for i in ids if not 0 <= i < card.vocab_size)
        raise InvalidRequest(
            f"'{field}' has {_short(bad)}, which is no token id from 0 to {card.vocab_size - 1}.", param=field
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
            _check_ids("prompt", prompt, card)
    return given


def _check_identity(body: GenerationBody) -> None:
    if body.user is not None and len(body.user) > MAX_USER_CHARS:
        raise InvalidRequest(f"'user' may have at most {MAX_USER_CHARS} characters.", param="user")
    if body.metadata and len(json.dumps(body.metadata)) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"'metadata' may have at most {MAX_METADATA_BYTES} bytes.", param="metadata")


def _salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARS or any(char in salt for char in "@/\\\0"):
        raise InvalidRequest(
            f"'cache_salt' must have 1 to {MAX_SALT_CHARS} characters and none of @ / \\ NUL.", param="cache_salt"
        )
    return salt


def _check_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    """NaN is in no range."""
    if (low < value if above_low else low <= value) and value <= high:
        return
    lowest = f"above {low}" if above_low else f"at least {low}"
    raise InvalidRequest(f"'{field}' must be {lowest} and at most {high}, not {_short(value)}.", param=field)


def _short(value: float) -> str:
    """Clients may send numbers of any length."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return str(value)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
