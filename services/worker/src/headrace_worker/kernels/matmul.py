"""A matrix product in which a row's result does not depend on the other rows: for the deterministic mode.

Libraries choose tiles and splits by the number of rows, and with them the order in which products are added. Here the
order is fixed by the weight alone: the inner dimension is cut into segments, each is added up from zero by the same
instructions on tiles of the same shape, and the segments are added in order. Whether one program computes all segments
of a tile (many rows) or a program each, added by a second kernel (few rows), gives the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.rows import ELEMENT_TYPES
from headrace_worker.kernels.specialization import Specialization

ADJACENT_TILES = 8
"""Tiles of rows that are computed beside each other for one tile of columns: they find the weight in the cache."""
ADD_BLOCK = 1024
INPUT_STEP = 16
"""The number of inputs must be a multiple of this."""


class Tiling(NamedTuple):
    """The order of addition: results of different tilings have different bits."""

    rows: int = 128
    columns: int = 128
    inner: int = 32
    segment: int = 1024
    """Of the inner dimension; a multiple of `inner`."""
    num_warps: int = 8
    num_stages: int = 4


DEFAULT_TILING = Tiling()


@jit
def tile_at(index, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADJACENT: tl.constexpr):
    """(row tile, column tile) of the index-th tile, in an order that keeps what is read together close."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    band = index // (ADJACENT * column_tiles)
    height = tl.minimum(row_tiles - band * ADJACENT, ADJACENT)
    within = index - band * ADJACENT * column_tiles
    return band * ADJACENT + within % height, within // height


@jit(do_not_specialize=("num_rows",))
def _matmul(
    rows,
    weight,
    bias,
    output,
    num_rows,
    num_columns,
    row_stride,
    INNER: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """output [rows, columns], or with SPLIT the sums of the segments, float32 [segments, rows, columns]. Programs take
    tiles (with SPLIT: of one segment) in turn."""
    SEGMENTS: tl.constexpr = (INNER + SEGMENT - 1) // SEGMENT
    PIECES: tl.constexpr = SEGMENTS if SPLIT else 1
    num_tiles = tl.cdiv(num_rows, ROWS) * tl.cdiv(num_columns, COLUMNS)
    for index in range(tl.program_id(0), num_tiles * PIECES, tl.num_programs(0)):
        row_tile, column_tile = tile_at(index // PIECES, num_rows, num_columns, ROWS, COLUMNS, ADJACENT)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        row_places = rows + row.to(tl.int64)[:, None] * row_stride + depth[None, :]
        weight_places = weight + column.to(tl.int64)[None, :] * INNER + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        first = index % PIECES
        for segment in range(first, first + (SEGMENTS if PIECES == 1 else 1)):
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            for step in range(0, SEGMENT, DEPTH):
                start = segment * SEGMENT + step
                left = (row < num_rows)[:, None]
                right = (column < num_columns)[None, :]
                if INNER % SEGMENT != 0:
                    left = left & (start + depth < INNER)[None, :]
                    right = right & (start + depth < INNER)[:, None]
                a = tl.load(row_places + start, mask=left, other=0.0)
                b = tl.load(weight_places + start, mask=right, other=0.0)
                if WIDEN:  # the interpreter cannot multiply bfloat16
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                part = tl.dot(a, b, part, input_precision="ieee")
            total += part
        inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        places = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        if SPLIT:
            places += first.to(tl.int64) * num_rows * num_columns
        elif bias is not None:
            total += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
        tl.store(output + places, total.to(output.dtype.element_ty), mask=inside)


@jit(do_not_specialize=("size",))
def add_parts(parts, bias, output, size, num_columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [PARTS, size] float32 -> output [size], added in order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + part * size + places, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + places % num_columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + places, total.to(output.dtype.element_ty), mask=inside)


def matmul(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiling: Tiling = DEFAULT_TILING) -> Tensor:
    """rows [rows, inputs], weight [outputs, inputs] (bias [outputs]) of one float type -> [rows, outputs], added up in
    float32; rows may lie apart. The bits of a row are the same whatever the others are. ValueError for what the kernel
    does not take."""
    check_tensor("rows", rows, (None, None), ELEMENT_TYPES, row_stride=True)
    num_rows, inner = rows.shape
    check_tensor("weight", weight, (None, inner), (rows.dtype,), device=rows.device)
    num_columns = weight.shape[0]
    require(inner > 0 and inner % INPUT_STEP == 0, f"{inner} inputs, not a positive multiple of {INPUT_STEP}")
    if bias is not None:
        check_tensor("bias", bias, (num_columns,), ELEMENT_TYPES, device=rows.device)
    output = torch.empty((num_rows, num_columns), dtype=rows.dtype, device=rows.device)
    if not num_rows or not num_columns:
        return output
    segments = triton.cdiv(inner, tiling.segment)
    splits = segments > 1 and num_rows <= tiling.rows
    target = output
    if splits:
        target = torch.empty((segments, num_rows, num_columns), dtype=torch.float32, device=rows.device)
    tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns) * (segments if splits else 1)
    _matmul[(min(tiles, num_programs(rows.device)),)](
        rows,
        weight,
        None if splits else bias,
        target,
        num_rows,
        num_columns,
        rows.stride(0),
        INNER=inner,
        SEGMENT=tiling.segment,
        SPLIT=splits,
        WIDEN=rows.device.type == "cpu",
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.inner,
        ADJACENT=ADJACENT_TILES,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if splits:
        add(target, bias, output)
    return output


def add(parts: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """parts [parts, rows, columns] float32, added in order, and the bias [columns], into output [rows, columns]."""
    size = output.numel()
    add_parts[(triton.cdiv(size, ADD_BLOCK),)](
        parts, bias, output, size, output.shape[1], PARTS=parts.shape[0], BLOCK=ADD_BLOCK, num_warps=4
    )


def num_programs(device: torch.device) -> int:
    """One a multiprocessor, which is what persistent programs of this size want."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


MATRIX = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

SPECIALIZATIONS = [
    *(
        Specialization(
            f"matmul[{'split' if split else 'whole'}]",
            _matmul,
            {
                "rows": "*bf16",
                "weight": "*bf16",
                "output": "*fp32" if split else "*bf16",
                "num_rows": "i32",
                "num_columns": "i32",
                "row_stride": "i32",
            },
            {
                "bias": None,
                "INNER": 4096,
                "SEGMENT": DEFAULT_TILING.segment,
                "SPLIT": split,
                "WIDEN": False,
                "ROWS": DEFAULT_TILING.rows,
                "COLUMNS": DEFAULT_TILING.columns,
                "DEPTH": DEFAULT_TILING.inner,
                "ADJACENT": ADJACENT_TILES,
            },
            {"num_warps": DEFAULT_TILING.num_warps, "num_stages": DEFAULT_TILING.num_stages},
            MATRIX,
            {"num_columns": 16, "row_stride": 16},
        )
        for split in (True, False)
    ),
    Specialization(
        "matmul: add_parts",
        add_parts,
        {"parts": "*fp32", "output": "*bf16", "size": "i32", "num_columns": "i32"},
        {"bias": None, "PARTS": 4, "BLOCK": ADD_BLOCK},
        {"num_warps": 4},
        attributes={"num_columns": 16},
    ),
]
