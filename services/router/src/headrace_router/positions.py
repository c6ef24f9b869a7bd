"""How far a client has been told an answer: the event ids of resumable streams. Pure.

An id says of which answer it is, how many tokens of each choice the events up to it were made of, and which choices
have ended: `1a2b3c4d.12.9f` is 12 tokens of choice 0, and all 9 of choice 1. It does not depend on how tokens were cut
into frames, in which order the choices' tokens came, or which router told it.
"""

import re
from collections.abc import Sequence

from headrace_shared.errors import InvalidRequest
from headrace_shared.messages import RequestId

TAG_DIGITS = 8

_ID = re.compile(r"[0-9a-f]{8}(?:\.[0-9]{1,9}f?){1,256}(?:\.u)?")


class Position:
    """Grows with the events that are told."""

    def __init__(self, request_id: RequestId, num_choices: int) -> None:
        """`request_id` of the call."""
        self._tag = request_id[:TAG_DIGITS]
        self._parts = ["0"] * num_choices
        self._num_tokens = [0] * num_choices
        self._is_finished = [False] * num_choices
        self.has_usage = False
        """The chunk with the usage was told too: only the end of the stream is left."""

    @property
    def num_tokens(self) -> Sequence[int]:
        return self._num_tokens

    def advance(self, choice: int, num_tokens: int, *, is_finished: bool) -> None:
        self._num_tokens[choice] = num_tokens
        self._is_finished[choice] = is_finished = self._is_finished[choice] or is_finished
        self._parts[choice] = f"{num_tokens}f" if is_finished else str(num_tokens)

    def covers(self, choice: int, num_tokens: int, *, is_finished: bool) -> bool:
        """Whether an event that leads to this state was told."""
        return num_tokens <= self._num_tokens[choice] and (self._is_finished[choice] or not is_finished)

    def to_id(self) -> str:
        return f"{self._tag}.{'.'.join(self._parts)}{'.u' if self.has_usage else ''}"


def parse_position(event_id: str, request_id: RequestId, num_choices: int) -> Position:
    """Raises InvalidRequest for what is no event id of this answer."""
    tag, *parts = event_id.split(".") if _ID.fullmatch(event_id) else [""]
    position = Position(request_id, num_choices)
    if parts and parts[-1] == "u":
        parts.pop()
        position.has_usage = True
    if tag != request_id[:TAG_DIGITS] or len(parts) != num_choices:
        raise InvalidRequest("The header Last-Event-ID is no event id of this answer.", param="Last-Event-ID")
    for choice, part in enumerate(parts):
        position.advance(choice, int(part.rstrip("f")), is_finished=part.endswith("f"))
    return position
