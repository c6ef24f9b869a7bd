"""/v1/embeddings: the mean of a decoder's last hidden states over a text's tokens, of length 1. Pure.

A call goes the way of completions: each input is a prompt of which nothing is generated, and its embedding comes with
what would have been the first token.
"""

from typing import Any, NamedTuple

from headrace_router.embedding_form import EmbeddingForm
from headrace_router.models import ServedModel
from headrace_router.prompt_size import MAX_INPUTS
from headrace_router.requests import EncodedPrompt, encode_prompts
from headrace_router.schemas import CompletionBody, EmbeddingBody
from headrace_router.validation import ValidParams, validate_completion
from headrace_shared.errors import InvalidRequest
from headrace_shared.fleet_messages import ModelCard

MAX_DIMENSIONS = 65_536
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Of a call's embeddings that are computed at a time. Until they are read they lie in the broker's memory, with the
tokens of all other calls."""


class ParsedEmbedding(NamedTuple):
    body: CompletionBody
    """The call as one for completions."""
    form: EmbeddingForm


def as_completion(body: EmbeddingBody) -> ParsedEmbedding:
    """Raises InvalidRequest."""
    encoding = body.encoding_format or "float"
    dimensions = body.dimensions
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InvalidRequest(f"'dimensions' must be 1 to {MAX_DIMENSIONS}.", param="dimensions")
    completion = CompletionBody.model_construct(  # all of it is checked: looking at each token id again takes long
        model=body.model,
        prompt=body.input,
        user=body.user,
        max_tokens=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        ignore_eos=True,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        add_special_tokens=body.add_special_tokens,
    )
    return ParsedEmbedding(completion, EmbeddingForm(encoding=encoding, dimensions=dimensions))


def validate_embedding(body: CompletionBody, card: ModelCard) -> tuple[list[str] | list[list[int]], ValidParams]:
    """The inputs, as given: texts or token ids. Raises InvalidRequest."""
    inputs = _inputs(body)
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"'input' must hold 1 to {MAX_INPUTS} texts.", param="input")
    for number, item in enumerate(inputs):
        if not item:
            name = "input" if len(inputs) == 1 else f"input[{number}]"
            raise InvalidRequest(f"'{name}' must not be empty.", param="input", code="empty_prompt")
        if isinstance(item, list) and not 0 <= min(item) <= max(item) < card.vocab_size:
            raise InvalidRequest(f"'input' has token ids that are not 0 to {card.vocab_size - 1}.", param="input")
    _, params = validate_completion(body.model_copy(update={"prompt": "-"}), card, 0)
    return inputs, params._replace(has_seed=True)


def max_inputs(card: ModelCard) -> int:
    """That are computed at a time, of one call."""
    num_bytes = 4 * card.hidden_size
    return min(MAX_INPUTS, max(1, MAX_ANSWER_BYTES // num_bytes)) if num_bytes else MAX_INPUTS


def encode_inputs(model: ServedModel, inputs: list[str] | list[list[int]], params: ValidParams) -> list[EncodedPrompt]:
    """Raises InvalidRequest."""
    try:
        return encode_prompts(model, inputs, params)
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        message = error.message.replace("'prompt", "'input").replace("the prompt has", "the input has")
        # Its one token is ours: the client has asked for none.
        message = message.replace("1 token was requested", "room for 1 token is needed behind it")
        raise InvalidRequest(message, param="input", code=error.code) from None


def _inputs(body: CompletionBody) -> list[str] | list[list[int]]:
    given: Any = body.prompt
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    inputs: list[str] | list[list[int]] = given
    return inputs
