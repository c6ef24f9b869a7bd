"""Responses as the broker keeps them: every router can read them, and goes on from them. Pure."""

import zlib
from typing import Any

import msgspec
from msgspec import Struct

from headrace_router.call_record import CallRecord
from headrace_router.responses_api.items import Items
from headrace_router.responses_api.response_object import FINAL
from headrace_shared.errors import ProtocolError
from headrace_shared.messages import TokenFrame

MAX_BYTES = 64 * 1024 * 1024
"""Of what is unpacked."""


class StoredResponse(Struct, frozen=True, tag=True, kw_only=True):
    owner: str
    """Nobody else gets it."""
    response: bytes
    """The object as it was last known, packed."""
    items: bytes
    """The conversation that it answers, packed: whoever continues it needs no earlier response."""
    call: CallRecord | None = None
    """Of a background response: how to find and write its answer."""
    answer: tuple[TokenFrame, ...] = ()
    """Of a background response that has ended: its tokens, so that its events can be told again."""

    @property
    def is_deleted(self) -> bool:
        """Only a mark is left."""
        return not self.response

    @property
    def object(self) -> dict[str, Any]:
        """Raises ProtocolError."""
        return dict(unpack(self.response))

    @property
    def conversation(self) -> Items:
        """With the response's output. Raises ProtocolError."""
        return self.input_items + list(self.object["output"])

    @property
    def input_items(self) -> Items:
        """Raises ProtocolError."""
        return list(unpack(self.items))


class Unfinished(Struct, frozen=True, tag=True, kw_only=True):
    """A background response without an end yet."""

    router: str
    """Which sees to it that it gets one."""


def is_final(response: dict[str, Any]) -> bool:
    return response["status"] in FINAL


def pack(value: Any) -> bytes:
    """Raises ProtocolError for what could not be unpacked again."""
    text = msgspec.json.encode(value)
    if len(text) > MAX_BYTES:
        raise ProtocolError(f"a stored response of {len(text)} bytes exceeds {MAX_BYTES}")
    return zlib.compress(text, 1)


def unpack(data: bytes) -> Any:
    """Raises ProtocolError for what is not packed."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, MAX_BYTES)
        if not unpacker.eof:
            raise ProtocolError(f"a stored response that is cut off, or of more than {MAX_BYTES} bytes")
        return msgspec.json.decode(text)
    except (zlib.error, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"undecodable stored response: {error}") from error
