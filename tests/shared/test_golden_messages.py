"""The bytes on the wire, and of keys and their accounts, which stay in the broker. A change here breaks a running fleet
during its update: only fields with defaults may come."""

from pathlib import Path
from types import UnionType
from typing import get_args, get_type_hints

import msgpack
import msgspec
import pytest
from msgspec import Struct

from headrace_router import rate_limits
from headrace_shared import api_keys, fleet_messages, messages, record_messages
from headrace_shared.codec import decode, encode
from tests.shared.samples import SAMPLES


def read_golden() -> dict[str, bytes]:
    golden: dict[str, str] = {}
    name = ""
    for line in Path(__file__).with_name("golden_messages.txt").read_text().splitlines():
        if line.startswith("["):
            name = line.strip("[]")
            golden[name] = ""
        else:
            golden[name] += line
    return {name: bytes.fromhex(text) for name, text in golden.items()}


GOLDEN = read_golden()


def test_every_message_type_is_covered() -> None:
    tagged = {
        name
        for module in (messages, fleet_messages, record_messages, api_keys, rate_limits)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__struct_config__.tag
    }
    assert tagged == set(SAMPLES) == set(GOLDEN)


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes_are_as_they_always_were(name: str) -> None:
    assert encode(SAMPLES[name]).hex() == GOLDEN[name].hex()


@pytest.mark.parametrize("name", SAMPLES)
def test_old_bytes_mean_the_same(name: str) -> None:
    assert decode(GOLDEN[name], type(SAMPLES[name])) == SAMPLES[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_leave_no_field_at_its_default(name: str) -> None:
    sample = SAMPLES[name]
    for field in msgspec.structs.fields(sample):
        if not field.required:
            assert getattr(sample, field.name) != field.default, field.name


@pytest.mark.parametrize("name", SAMPLES)
def test_unknown_fields_are_ignored(name: str) -> None:
    """A newer service may send more."""
    raw = msgpack.unpackb(GOLDEN[name], strict_map_key=False)
    data = msgpack.packb({**raw, "from_the_future": [1]})
    assert decode(data, type(SAMPLES[name])) == SAMPLES[name]


@pytest.mark.parametrize("union", [messages.ControlMessage, messages.ReportMessage, messages.LogMessage])
def test_unions_tell_their_members_apart(union: UnionType) -> None:
    for kind in get_args(union):
        sample = SAMPLES[kind.__name__]
        assert decode(GOLDEN[kind.__name__], union) == sample


def test_messages_hold_primitives_only() -> None:
    for kind in {type(sample) for sample in SAMPLES.values()}:
        assert get_type_hints(kind)
        msgspec.json.schema(kind)  # raises for anything that is no plain data
