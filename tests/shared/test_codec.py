"""Whatever arrives, decoding gives a valid message or a ProtocolError."""

import pickle
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace_router.rate_limits import AccountRecord
from headrace_shared.codec import MAX_MESSAGE_BYTES, decode, encode, pack_ids, unpack_ids
from headrace_shared.errors import ProtocolError
from headrace_shared.fleet_messages import Hello, Telemetry
from headrace_shared.messages import Admission, Cancel, Grant, Progress, Request, TokenFrame
from tests.shared.samples import REQUEST, SAMPLES

KINDS = [type(sample) for sample in SAMPLES.values()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x90",
        msgpack.packb(None),
        msgpack.packb("Request"),
        msgpack.packb([1] * 100),
        msgpack.packb({"type": "Nothing"}),
        msgpack.packb({"type": "Request"}),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x82\x90\x01\x90\x02",
        pickle.dumps({"a": 1}),
        pickle.dumps(print),
    ],
)
def test_hostile_bytes_are_refused(data: bytes, kind: type[Any]) -> None:
    if data == b"\x80" and kind is AccountRecord:
        assert decode(data, kind) == AccountRecord(), "nothing used yet"
        return
    with pytest.raises(ProtocolError):
        decode(data, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [None, -1, 1.5, "x", b"x", [], [[]], {}, {"a": 1}, True], ids=repr)
def test_each_field_of_a_wrong_type_is_refused_or_valid(kind: type[Any], value: object) -> None:
    """Puts `value` into every field in turn: a message comes out only if the type fits."""
    sample = next(sample for sample in SAMPLES.values() if type(sample) is kind)
    raw = msgpack.unpackb(encode(sample), strict_map_key=False)
    num_refused = 0
    for field in raw:
        try:
            message = decode(msgpack.packb({**raw, field: value}), kind)
        except ProtocolError:
            num_refused += 1
        else:
            assert encode(message) is not None
    assert num_refused >= len(raw) // 3


def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(encode(SAMPLES["Hello"]), Cancel)
    with pytest.raises(ProtocolError):
        decode(encode(SAMPLES["Admission"]), Grant | Progress)


def test_messages_cannot_be_too_large() -> None:
    large = Telemetry(service="x" * MAX_MESSAGE_BYTES, id="", state="")
    with pytest.raises(ProtocolError, match="exceeds"):
        encode(large)
    with pytest.raises(ProtocolError, match="exceeds"):
        decode(b"\x00" * (MAX_MESSAGE_BYTES + 1), Telemetry)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_random_bytes_are_refused(data: bytes, kind: type[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(data, kind)


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(PLAIN, st.sampled_from(KINDS))
def test_random_structures_are_refused(value: Any, kind: type[Any]) -> None:
    assume(kind is not AccountRecord or not isinstance(value, dict))  # all of its fields may be missing
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(value), kind)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_flipped_byte_gives_a_valid_message_or_an_error(name: str, data: st.DataObject) -> None:
    encoded = bytearray(encode(SAMPLES[name]))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    try:
        message = decode(bytes(encoded), type(SAMPLES[name]))
    except ProtocolError:
        return
    assert decode(encode(message), type(message)) is not None


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([Request, Admission, Grant, TokenFrame, Hello]), st.integers(0, 400))
def test_a_truncated_message_is_refused(kind: type[Any], length: int) -> None:
    whole = encode(SAMPLES[kind.__name__])
    with pytest.raises(ProtocolError):
        decode(whole[: min(length, len(whole) - 1)], kind)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert list(unpack_ids(packed)) == ids


def test_packed_ids_are_little_endian() -> None:
    assert pack_ids([1, 0xFFFFFFFF]) == REQUEST.prompt


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_ids_of_a_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_ids(b"\x00" * length)
