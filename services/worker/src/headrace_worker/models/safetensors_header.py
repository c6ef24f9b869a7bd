"""The header of a safetensors file, checked before the file is opened by anything else.

https://github.com/huggingface/safetensors#format: eight bytes with the length of the header, a JSON object that
describes every tensor, and the tensors' bytes, one after the other without a gap.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_shared.errors import ConfigError

MAX_HEADER_BYTES = 32 << 20
"""The format allows 100 MB; checkpoints of hundreds of billions of weights have some hundred kilobytes."""
MAX_DIMENSIONS = 8
READABLE = ("F64", "F32", "F16", "BF16")
"""What weights may be stored in."""
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorHead(NamedTuple):
    kind: str
    shape: tuple[int, ...]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> Mapping[str, TensorHead]:
    """Raises ConfigError for anything but a sound file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError("model", f"{path}: the header says it has {length} bytes, which cannot be")
            header = file.read(length)
    except OSError as error:
        raise ConfigError("model", f"cannot read {path}: {error}") from error
    try:
        entries = _entries(header)
        return _checked(entries, size - 8 - length)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError("model", f"{path} is not a sound safetensors file: {error}") from error


def _entries(header: bytes) -> dict[str, _Entry]:
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)
    return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}


def _checked(entries: Mapping[str, _Entry], num_bytes: int) -> dict[str, TensorHead]:
    """`num_bytes`: of all tensors. Raises ValueError."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ValueError(f"{name[:100]!r} does not begin where the tensor before it ends")
        if len(entry.shape) > MAX_DIMENSIONS or any(not 0 <= length < 1 << 63 for length in entry.shape):
            raise ValueError(f"{name[:100]!r} has an impossible shape")
        if entry.dtype not in _BITS:
            raise ValueError(f"{name[:100]!r} is stored as {entry.dtype[:32]!r}, which is not known")
        if math.prod(entry.shape) * _BITS[entry.dtype] != (end - begin) * 8:
            raise ValueError(f"the shape of {name[:100]!r} does not fit its {end - begin} bytes")
        position = end
    if position != num_bytes:
        raise ValueError(f"the tensors have {position} bytes, the file {num_bytes} (incomplete download?)")
    return {name: TensorHead(entry.dtype, tuple(entry.shape)) for name, entry in entries.items()}
