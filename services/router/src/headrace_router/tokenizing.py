"""What /tokenize and /detokenize are asked for, checked. Pure but for the tokenizing itself, which is for a thread."""

from collections.abc import Callable

from headrace_router.models import ServedModel
from headrace_router.requests import check_chat_length, check_length
from headrace_router.schemas import DetokenizeBody, TokenizeBody
from headrace_router.token_rules import check_ids
from headrace_router.tools import described
from headrace_router.valid_chat import chat_of
from headrace_shared.errors import InvalidRequest

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "tools")


def tokens_of(body: TokenizeBody, model: ServedModel) -> Callable[[], list[int]]:
    """What finds the tokens. Raises InvalidRequest, naming the field."""
    if body.messages is None:
        return _of_text(body, model)
    if body.prompt is not None:
        raise InvalidRequest("'messages' cannot be combined with 'prompt'.", param="messages")
    chat = chat_of(body, model.card.chat_template or "", described(body.tools))
    check_chat_length(model, chat, None)
    special = bool(body.add_special_tokens)  # a template has its own
    return lambda: model.encoder.encode_chat(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        variables=chat.template_variables,
        tools=chat.tools,
        continues=chat.continues,
        add_special_tokens=special,
    )


def check_ids_known(body: DetokenizeBody, model: ServedModel) -> None:
    check_ids("tokens", body.tokens, model.card)


def _of_text(body: TokenizeBody, model: ServedModel) -> Callable[[], list[int]]:
    text = body.prompt
    if text is None:
        raise InvalidRequest("'prompt' is required.", param="prompt", code="missing_required_parameter")
    for field in CHAT_FIELDS:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"'{field}' needs 'messages'.", param=field)
    check_length(model, len(text), None, "prompt")
    special = body.add_special_tokens is not False
    return lambda: model.encoder.encode(text, add_special_tokens=special)
