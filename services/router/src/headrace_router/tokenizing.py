"""What /tokenize and /detokenize are asked for, checked. Pure but for the tokenizing itself, which is for a thread."""

from collections.abc import Callable
from functools import partial

from headrace_router.models import ServedModel
from headrace_router.requests import check_chat_length, check_length, count_ids
from headrace_router.schemas import DetokenizeBody, TokenizeBody
from headrace_router.token_rules import check_ids
from headrace_router.tools import described
from headrace_router.valid_chat import ValidChat, chat_of
from headrace_router.validation import CONTEXT_EXCEEDED
from headrace_shared.errors import InvalidRequest

CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort", "tools")


def chat_to_tokenize(body: TokenizeBody, model: ServedModel) -> ValidChat | None:
    """None: it is a text. Raises InvalidRequest, naming the field."""
    if body.messages is None:
        return None
    if body.prompt is not None:
        raise InvalidRequest("'messages' cannot be combined with 'prompt'.", param="messages")
    chat = chat_of(body, model.card.chat_template or "", described(body.tools))
    check_chat_length(model, chat, None)
    return chat


def tokens_of_chat(body: TokenizeBody, model: ServedModel, text: bytes) -> list[int]:
    """`text`: the chat, as rendered. A template has special tokens of its own. Raises InvalidRequest."""
    ids = count_ids(model.encoder.chat.ids, text.decode(), model, "messages")
    return model.encoder.with_bos(ids) if body.add_special_tokens else ids


def text_tokens(body: TokenizeBody, model: ServedModel) -> Callable[[], list[int]]:
    """What finds the tokens of a text. Raises InvalidRequest, naming the field."""
    text = body.prompt
    if text is None:
        raise InvalidRequest("'prompt' is required.", param="prompt", code="missing_required_parameter")
    for field in CHAT_FIELDS:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"'{field}' needs 'messages'.", param=field)
    check_length(model, len(text), None, "prompt")
    encode = partial(model.encoder.encode, add_special_tokens=body.add_special_tokens is not False)
    return lambda: count_ids(encode, text, model, "prompt")


def check_ids_known(body: DetokenizeBody, model: ServedModel) -> None:
    """No text of the model has more tokens than its context; a token may stand for a hundred bytes."""
    most = model.card.context
    if len(body.tokens) > most:
        raise InvalidRequest(f"'tokens' may have at most {most} token ids.", param="tokens", code=CONTEXT_EXCEEDED)
    check_ids("tokens", body.tokens, model.card)
