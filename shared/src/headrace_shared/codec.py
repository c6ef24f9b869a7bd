"""Messages to bytes and back, with hard limits. The only place that knows the wire format.

MessagePack, one message a payload. Decoding checks twice: the unpacker's limits bound what a hostile payload can make
us allocate, then every field is checked against its declared type. Anything else is a `ProtocolError`.
"""

import sys
from array import array
from collections.abc import Iterable
from types import UnionType
from typing import Any, TypeVar, overload

import msgpack
import msgspec

from headrace_shared.errors import ProtocolError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Above any message of ours; the broker's own limit (`max_payload`) is usually lower and checked when sending."""
MAX_ITEMS = 1_000_000
"""Longest array or map in a message."""

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
        raw = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            use_list=True,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        return msgspec.convert(raw, type=kind)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException, msgspec.ValidationError) as error:
        # Unhashable map keys are a TypeError; the rest of msgpack's own errors are ValueErrors.
        raise ProtocolError(f"undecodable message: {error}") from error


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
