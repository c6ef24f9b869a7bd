"""A call for many embeddings: taken piece by piece, told as one. Pure.

Each piece is a call of its own that answers in base64; what the client gets is put together from their answers.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from headrace_router.call_record import Wording
from headrace_router.embedding_form import EmbeddingForm, EmbeddingObject, EmbeddingUsage, floats_of
from headrace_router.embeddings import max_inputs, validate_embedding
from headrace_router.identity import Identity
from headrace_router.preparation import Parsed
from headrace_router.responses import to_json
from headrace_router.schemas import CompletionBody
from headrace_shared.fleet_messages import ModelCard


class PieceAnswer(Struct, frozen=True):
    """What is read of a piece's `EmbeddingList`."""

    model: str
    data: list[Raw]
    """`EmbeddingObject`s."""
    usage: EmbeddingUsage


def pieces_for(parsed: Parsed, card: ModelCard, identity: Identity) -> list[Parsed]:
    """Each no larger than the broker bears, nor than the caller may run at once; the call itself if that is no larger.
    Raises InvalidRequest."""
    body = parsed.body
    assert isinstance(body, CompletionBody), type(body).__name__
    inputs, _ = validate_embedding(body, card)
    most = max_inputs(card)
    if identity.key is not None and identity.key.max_concurrent:
        most = min(most, identity.key.max_concurrent)
    if len(inputs) <= most:
        return [parsed]
    form = msgspec.structs.replace(form_wanted(parsed), encoding="base64")
    wording = Wording(parsed.wording.dialect, msgspec.json.encode(form))
    parts = (inputs[start : start + most] for start in range(0, len(inputs), most))
    bodies = (body.model_copy(update={"prompt": part}) for part in parts)
    return [Parsed(parsed.endpoint, each, parsed.given.part(), wording) for each in bodies]


def form_wanted(parsed: Parsed) -> EmbeddingForm:
    return msgspec.json.decode(parsed.wording.about, type=EmbeddingForm)


def read_answer(body: bytes) -> PieceAnswer:
    return msgspec.json.decode(body, type=PieceAnswer)


def beginning() -> bytes:
    """Of an `EmbeddingList`: behind it come the objects, with commas between them, and then its end."""
    return b'{"object":"list","data":['


def written(objects: Sequence[Raw], first: int, form: EmbeddingForm) -> bytes:
    """Objects of one piece as the client wants them; `first`: how many are before them."""
    parts = []
    for index, raw in enumerate(objects, first):
        packed = msgspec.json.decode(raw, type=EmbeddingObject).embedding
        assert isinstance(packed, str), "pieces are in base64"
        embedding = packed if form.encoding == "base64" else floats_of(packed)
        parts.append(to_json(EmbeddingObject("embedding", index, embedding)))
    return b",".join(parts)


def ending(answers: Sequence[PieceAnswer]) -> bytes:
    num_tokens = sum(answer.usage.prompt_tokens for answer in answers)
    usage = to_json(EmbeddingUsage(num_tokens, num_tokens))
    return b'],"model":' + msgspec.json.encode(answers[0].model) + b',"usage":' + usage + b"}"
