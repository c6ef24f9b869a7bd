"""Messages to bytes and back, with hard limits. The only place that knows the wire format.

MessagePack, one message a payload: written by msgpack, read by msgspec, whose decoder knows types. Every field is
checked against its declared type while it is decoded, and what a payload claims to hold is allocated only as it comes,
so a hostile one costs no more than its size. Anything that is no message is a `ProtocolError`.
"""

import sys
from array import array
from collections.abc import Iterable
from functools import cache
from types import UnionType
from typing import Any, TypeVar, overload

import msgpack
import msgspec

from headrace_shared.errors import ProtocolError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Above any message of ours; the broker's own limit (`max_payload`) is usually lower and checked when sending."""

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Encodes one message. Raises ProtocolError above MAX_MESSAGE_BYTES."""
    data: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return data


@overload
def decode(data: bytes, kind: type[T]) -> T: ...


@overload
def decode(data: bytes, kind: UnionType) -> Any: ...


def decode(data: bytes, kind: Any) -> Any:
    """Decodes one message of the given class (or union of tagged classes). Raises ProtocolError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    try:
        return _decoder_of(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        # Text that is no UTF-8 is a ValueError, an unhashable map key a TypeError.
        raise ProtocolError(f"undecodable message: {error}") from error


@cache
def _decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """There are as many as kinds of messages and unions of them."""
    return msgspec.msgpack.Decoder(kind)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """The inverse of `pack_ids`. Raises ProtocolError unless the length is a multiple of 4."""
    packed = array("I")
    try:
        packed.frombytes(data)
    except ValueError as error:
        raise ProtocolError(f"{len(data)} bytes are no packed token ids") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
