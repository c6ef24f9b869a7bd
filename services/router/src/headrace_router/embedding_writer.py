"""Writes the answer of a call for embeddings. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import Raw

from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_router.embedding_form import EmbeddingForm, EmbeddingUsage, embedding_object
from headrace_router.http_errors import error_object
from headrace_router.responses import to_json
from headrace_shared.errors import RequestError


class EmbeddingWriter:
    """A `Writer` of answers that are never streamed."""

    ping = b""
    result = b""
    """It is not kept."""

    def __init__(self, model: str, form: EmbeddingForm) -> None:
        self.model = model
        self.headers: Mapping[str, str] = {}
        self._form = form

    def begin(self) -> bytes:
        return b""

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: RequestError, shown_id: str) -> bytes:
        return to_json({"error": error_object(error, shown_id)})

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        """An `EmbeddingList`. Each embedding is written by itself: all at once, in C, would hold up all threads."""
        objects = [Raw(to_json(embedding_object(self._form, *numbered))) for numbered in enumerate(deltas)]
        told = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        return to_json({"object": "list", "data": objects, "model": self.model, "usage": told})
