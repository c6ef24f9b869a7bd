"""What answers are written by: each API has its own words for the same tokens."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_router.choices import ChoiceDelta, Delta, Usage
from headrace_shared.errors import RequestError


class Writer(Protocol):
    """Of one answer, whole or streamed. Pure."""

    @property
    def model(self) -> str:
        """Which answers."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the response, beside those that all have."""
        ...

    @property
    def ping(self) -> bytes:
        """Shows that a stream lives which has nothing to tell."""
        ...

    @property
    def result(self) -> bytes:
        """The whole answer as it is kept, once it has ended. Empty: it is not kept."""
        ...

    def begin(self) -> bytes:
        """What a stream tells before anything is known of the answer."""
        ...

    def events(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...

    def end(self, usage: Usage) -> bytes:
        """Of a stream that is complete."""
        ...

    def failure(self, error: RequestError, shown_id: str) -> bytes:
        """The end of a stream that is not. `shown_id`: the request's, as the client knows it."""
        ...

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        """An answer that is not streamed. `deltas[i]` are all of choice i."""
        ...
