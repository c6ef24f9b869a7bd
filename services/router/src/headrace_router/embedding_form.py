"""How embeddings are written. Pure.

With `dimensions` the first components are kept and brought to length 1 again.
"""

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from headrace_router.choices import ChoiceText, Delta
from headrace_shared.errors import InvalidRequest, ServiceFailure
from headrace_shared.messages import FinishReason, TokenFrame


class EmbeddingForm(Struct, frozen=True, kw_only=True):
    """How a call's embeddings are written."""

    encoding: Literal["float", "base64"] = "float"
    """base64: of 32-bit floats, little-endian."""
    dimensions: int | None = None


class EmbeddingObject(Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class EmbeddingChoice(ChoiceText):
    """Nothing is read of its token but that it is there."""

    def push(self, frame: TokenFrame) -> Delta:
        self.finish = FinishReason.STOP
        return Delta(finish=self.finish, embedding=frame.embedding)


def embedding_object(form: EmbeddingForm, index: int, parts: Sequence[Delta]) -> EmbeddingObject:
    """`parts` are all of this input. Raises InvalidRequest if the model's embeddings are shorter than wanted."""
    packed = b"".join(part.embedding for part in parts)
    if not packed or len(packed) % 4:
        raise ServiceFailure("An embedding was lost.", code="tokens_lost")
    return EmbeddingObject("embedding", index, _written(packed, form))


def floats_of(text: str) -> list[float]:
    """Of an embedding in base64."""
    values = array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _written(packed: bytes, form: EmbeddingForm) -> list[float] | str:
    values = array("f", packed)
    if sys.byteorder == "big":
        values.byteswap()
    if form.dimensions is not None:
        values = _shortened(values, form.dimensions)
    if form.encoding == "float":
        return values.tolist()
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _shortened(values: "array[float]", dimensions: int) -> "array[float]":
    if dimensions > len(values):
        raise InvalidRequest(
            f"'dimensions' must be at most {len(values)} for this model.", param="dimensions", code="invalid_value"
        )
    if dimensions == len(values):
        return values
    length = math.sqrt(math.fsum(value * value for value in values[:dimensions]))
    return array("f", [value / length if length else 0.0 for value in values[:dimensions]])
