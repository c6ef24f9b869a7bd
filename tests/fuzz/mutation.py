"""Valid input to input that is nearly valid: what finds faults in parsers."""

import json
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

MOST_REPEATED = 200_000
"""A list is repeated until it has about so many characters."""
Mutate = Callable[[Random, bytes], bytes]

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**12)
_TEXTS = (
    "",
    "\0",
    "a\r\nb\n\nc: d",
    "\u2028\u2029",
    "<|im_end|>",
    "😀" * 50,
    "(" * 5000,
    "(a+)+b",
    "../../etc/passwd",
    "hf://x/y",
    "nan",
    "x" * 100_000,
)
_CHUNKS = (
    b"",
    b"\0" * 16,
    b"\xff" * 16,
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 5000,
    b"[" * 5000,
    b'{"a":' * 5000,
    msgpack.packb(msgpack.ExtType(5, b"x")),
    msgpack.packb(msgpack.Timestamp(1)),
    pickle.dumps(print),
)


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Some bytes changed, cut out, repeated or put in; numbers in them replaced."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        position = random.randrange(len(out) + 1)
        match random.randrange(7):
            case 0 if out:
                out[position % len(out)] ^= 1 << random.randrange(8)
            case 1 if out:
                out[position % len(out)] = random.randrange(256)
            case 2:
                del out[position : position + random.choice((1, 2, 4, 8, 64))]
            case 3:
                out[position:position] = random.choice(_CHUNKS)
            case 4:
                width = random.choice((1, 2, 4, 8))
                number = random.choice(NUMBERS) & ((1 << (8 * width)) - 1)
                out[position : position + width] = number.to_bytes(width, random.choice(("little", "big")))
            case 5:
                out[position:position] = out[position : position + random.randrange(1, 64)]
            case _:
                del out[position:]
    return bytes(out)


def mutate_json(random: Random, data: bytes) -> bytes:
    """Mostly JSON of the wrong shape; sometimes no JSON."""
    if random.random() < 0.2:
        return mutate_bytes(random, data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # it was changed before
        return mutate_bytes(random, data)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _changed(random, value)
    try:
        return json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", errors="surrogatepass")
    except RecursionError:
        return data


def mutate_msgpack(random: Random, data: bytes) -> bytes:
    if random.random() < 0.4:
        return mutate_bytes(random, data)
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):  # it was changed before
        return mutate_bytes(random, data)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _changed(random, value)
    try:
        packed: bytes = msgpack.packb(value)
    except (OverflowError, ValueError, RecursionError, UnicodeEncodeError):
        return mutate_bytes(random, data)
    return packed


def mutate_text(random: Random, data: bytes) -> bytes:
    """UTF-8 stays UTF-8."""
    text = data.decode(errors="replace")
    position = random.randrange(len(text) + 1)
    put = random.choice(("", random.choice(_TEXTS[:6]), chr(random.randrange(0xD800)), text[:position]))
    return (text[:position] + put + text[position + random.randrange(3) :]).encode()


def _changed(random: Random, value: Any) -> Any:
    """One place of it, at any depth, is something else."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        match random.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return {**value, random.choice(_TEXTS): value[key]}
            case 2:
                return {**value, key: value[random.choice(list(value))]}
            case _:
                return {**value, key: _changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = random.randrange(len(value))
        if random.random() < 0.1 and (size := len(repr(value))) < MOST_REPEATED:
            return value * max(2, random.choice((2, 100, MOST_REPEATED // size)) // len(value))
        return [*value[:at], _changed(random, value[at]), *value[at + 1 :]]
    return _odd(random)


def _odd(random: Random) -> Any:
    match random.randrange(10):
        case 0:
            return random.choice((None, True, False, [], {}, [[]], {"": {}}))
        case 1 | 2:
            return random.choice(NUMBERS)
        case 3:
            return random.choice((0.5, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"), -1e9))
        case 4:
            return _nested(random.choice((10, 150, 600)), random.choice(("list", "dict")))
        case 5:
            return [random.choice(NUMBERS)] * random.choice((1, 100, 5000))
        case 6:
            return {f"k{number}": number for number in range(random.choice((1, 100, 3000)))}
        case 7:
            return chr(random.choice((0xD800, 0xDFFF, 0, 0x7F, 0xFFFF, 0x10FFFF)))
        case _:
            return random.choice(_TEXTS)


def _nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value
