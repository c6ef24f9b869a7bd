"""Reads GGUF files: metadata at once, tensors one by one, straight from the mapped file.

The `gguf` package supplies the types and the dequantization. The header is parsed here because the package's reader
builds an array object for each of a hundred thousand vocabulary entries, which takes seconds at every start.
A file is input from outside: every length is checked against the file before it is used.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from headrace_shared.errors import ConfigError
from headrace_worker.native.dequantize import dequantize

MAX_ENTRIES = 1 << 17
"""Most metadata entries or tensors that a file may announce."""
MAX_ITEMS = 1 << 22
"""Most elements of all metadata arrays together: a few for each token of a vocabulary."""
MAX_HEADER_BYTES = 256 << 20
MAX_ALIGNMENT = 1 << 20

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    """Rows first, as in torch (the file has the fastest dimension first)."""
    kind: gguf.GGMLQuantizationType
    offset: int
    """From the start of the file."""
    num_bytes: int


class GgufFile:
    """`metadata` by key and `tensors` by name. Raises ConfigError if the file is not a sound GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError("model", f"cannot read {path}: {error}") from error
        try:
            self.metadata, self.tensors = _Header(self._data).parse()
        except (struct.error, ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
            raise ConfigError("model", f"{path} is not a sound GGUF file: {error}") from error

    @property
    def is_quantized(self) -> bool:
        return any(gguf.GGML_QUANT_SIZES[info.kind][0] > 1 for info in self.tensors.values())

    def tensor(self, name: str, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """float32, dequantized, rows first: all of it, or consecutive rows, and columns of a matrix. Of the file, only
        that is read."""
        info = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        block_size, type_size = gguf.GGML_QUANT_SIZES[info.kind]
        stored = raw.reshape(*info.shape[:-1], -1)
        is_vector = len(info.shape) == 1
        first = 0
        if columns is not None:
            first = columns.start // block_size
            stored = stored[..., first * type_size : -(-columns.stop // block_size) * type_size]
        if rows is not None and not is_vector:
            stored = stored[rows.start : rows.stop]
        values = _values(np.ascontiguousarray(stored), info.kind)
        if columns is not None:
            values = values[..., columns.start - first * block_size : columns.stop - first * block_size]
        if rows is not None and is_vector:
            values = values[rows.start : rows.stop]
        # Unquantized tensors come back as views of the read-only file.
        is_own = values.flags.owndata and values.flags.c_contiguous and values.dtype == np.float32
        return torch.from_numpy(values if is_own else np.array(values, dtype=np.float32, copy=True))


def _values(rows: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    if block_size > 1:
        compiled = dequantize(rows.reshape(*rows.shape[:-1], -1, type_size), int(kind), block_size)
        if compiled is not None:
            return compiled
    try:
        plain: np.ndarray[Any, Any] = gguf.quants.dequantize(_typed(rows, kind), kind)
    except NotImplementedError as error:
        raise ConfigError("model", f"quantization {kind.name} is not supported") from error
    return plain


def _typed(rows: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    if kind == gguf.GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if kind == gguf.GGMLQuantizationType.F16:
        return rows.view(np.float16)
    return rows


class _TensorHead(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    """From the start of all tensors."""


def _tensors(heads: list[_TensorHead], start: int, alignment: int, num_bytes: int) -> dict[str, TensorInfo]:
    """`start`: of all tensors; `num_bytes`: of the file. Raises ValueError, KeyError."""
    tensors: dict[str, TensorInfo] = {}
    position = 0
    for name, shape, kind, offset in sorted(heads, key=lambda head: head.offset):
        shown = repr(name[:100])
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size or min(shape) < 1:
            raise ValueError(f"{shown}: rows of {shape[-1]} are no multiple of {block_size}")
        size = math.prod(shape) // block_size * type_size
        if start + offset + size > num_bytes:
            raise ValueError(f"{shown} reaches beyond the end of the file (incomplete download?)")
        if offset < position or offset % alignment or name in tensors:
            raise ValueError(f"{shown} overlaps another tensor, is not aligned, or is there twice")
        position = offset + size
        tensors[name] = TensorInfo(shape, kind, start + offset, size)
    return tensors


class _Header:
    """A cursor over the file's head; every method moves it."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._position = 0
        self._num_items = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != b"GGUF":
            raise ValueError("wrong magic number")
        if (version := self._number("<I")) not in (2, 3):
            raise ValueError(f"version {version}")
        num_tensors = self._count("<Q", MAX_ENTRIES)
        num_entries = self._count("<Q", MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise ValueError(f"{key[:100]!r} is there twice")
            metadata[key] = self._value(self._number("<I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError("general.alignment is impossible")
        start = -(-self._position // alignment) * alignment
        return metadata, _tensors(heads, start, alignment, len(self._data))

    def _tensor_head(self) -> "_TensorHead":
        name = self._string()
        num_dimensions = self._count("<I", 4)
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1] or (1,)
        kind = gguf.GGMLQuantizationType(self._number("<I"))
        return _TensorHead(name, shape, kind, self._number("<Q"))

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > self._end:
            raise ValueError("unexpected end of file" if self._end == len(self._data) else "the header is too long")
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self, form: str, most: int) -> int:
        count = int(self._number(form))
        if count > most:
            raise ValueError(f"{count} entries, more than {most}")
        return count

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind = self._number("<I")
            count = self._count("<Q", MAX_ITEMS - self._num_items)
            self._num_items += count
            if item_kind == _ARRAY:
                raise ValueError("nested arrays")
            if item_kind in _SCALARS:
                form = f"<{count}{_SCALARS[item_kind][1]}"
                return list(struct.unpack(form, self._bytes(struct.calcsize(form))))
            return [self._value(item_kind) for _ in range(count)]
        return self._number(_SCALARS[kind])
