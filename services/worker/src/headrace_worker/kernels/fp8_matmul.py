"""Matrix products of e4m3 weights and activations (Micikevicius et al., "FP8 formats for deep learning", 2022).

For GPUs that multiply them: Ada, Hopper and later. Weights are scaled by output, activations by token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.int_matmul import OUTPUTS, TOKENS, num_splits
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.matmul import MATRIX, add, tile_at
from headrace_worker.kernels.quantized_weights import FP8, FP8_MAX, Fp8Weight
from headrace_worker.kernels.rows import ELEMENT_TYPES, WIDEST_ROW
from headrace_worker.kernels.specialization import Specialization

STEP = 128
"""Inputs at once. Between two steps the sums are added in float32: the matrix unit of Hopper adds products of 8-bit
floats with fewer bits (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3)."""


@jit
def _rounded(numbers):
    """Rounded to e4m3, in float32: to three bits of mantissa, and to multiples of 2^-9 (the ulp of 2^14) near zero."""
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(numbers) < 0.015625, (numbers + 24576.0) - 24576.0, normal)


@jit
def _quantize_rows(
    rows,
    values,
    scales,
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    given = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(given), axis=0), 1e-12)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + LARGEST)
    tl.store(scales + row, scale)
    scaled = tl.minimum(tl.maximum(tl.div_rn(given, tl.zeros_like(given) + scale), -LARGEST), LARGEST)
    if ROUNDS:  # the interpreter loses the carry when a mantissa is rounded up
        scaled = _rounded(scaled)
    tl.store(values + row * WIDTH + columns, scaled.to(values.dtype.element_ty), mask=inside)


@jit(do_not_specialize=("num_tokens",))
def _fp8_matmul(
    rows,
    row_scales,
    values,
    scales,
    bias,
    output,
    num_tokens,
    num_outputs,
    INNER: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (tile, split): output [tokens, outputs], or with SPLITS > 1 float32 [splits, tokens, outputs]."""
    token_tile, output_tile = tile_at(tl.program_id(0), num_tokens, num_outputs, TOKENS, OUTPUTS, 8)
    split = tl.program_id(1)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    column = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, STEP)
    real_token = token < num_tokens
    real_output = column < num_outputs
    row_places = rows + token.to(tl.int64)[None, :] * INNER + depth[:, None]
    weight_places = values + column.to(tl.int64)[:, None] * INNER + depth[None, :]
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    STEPS: tl.constexpr = (INNER + STEP - 1) // STEP
    for step in range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS):
        left = real_output[:, None]
        right = real_token[None, :]
        if INNER % STEP != 0:
            left = left & (step * STEP + depth < INNER)[None, :]
            right = right & (step * STEP + depth < INNER)[:, None]
        w = tl.load(weight_places + step * STEP, mask=left, other=0.0)
        x = tl.load(row_places + step * STEP, mask=right, other=0.0)
        if WIDEN:  # the interpreter cannot multiply them as they are
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        total += tl.dot(w, x)
    total *= tl.load(scales + column, mask=real_output, other=0.0)[:, None]
    total *= tl.load(row_scales + token, mask=real_token, other=0.0)[None, :]
    places = token.to(tl.int64)[None, :] * num_outputs + column[:, None]
    if SPLITS > 1:
        places += split.to(tl.int64) * num_tokens * num_outputs
    elif bias is not None:
        total += tl.load(bias + column, mask=real_output, other=0.0).to(tl.float32)[:, None]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=real_output[:, None] & real_token[None, :])


def quantize_rows(rows: Tensor) -> Fp8Weight:
    """rows [rows, inputs], may lie apart -> e4m3 values with a scale a row. ValueError for what the kernel does not
    take."""
    check_tensor("rows", rows, (None, None), ELEMENT_TYPES, row_stride=True)
    num_rows, width = rows.shape
    require(0 < width <= WIDEST_ROW, f"rows of {width} elements, not 1 to {WIDEST_ROW}")
    values = torch.empty((num_rows, width), dtype=FP8, device=rows.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _quantize_rows[(num_rows,)](
            rows,
            values,
            scales,
            rows.stride(0),
            WIDTH=width,
            BLOCK=block,
            LARGEST=FP8_MAX,
            ROUNDS=rows.device.type == "cpu",
            num_warps=max(1, min(16, block // 512)),
        )
    return Fp8Weight(values, scales)


def fp8_matmul(rows: Fp8Weight, weight: Fp8Weight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """rows (values [rows, inputs], scales [rows]) times the weight -> [rows, outputs] of `dtype`. ValueError for what
    the kernel does not take."""
    device = rows.values.device
    check_tensor("rows", rows.values, (None, None), (FP8,))
    num_tokens, inner = rows.values.shape
    check_tensor("row scales", rows.scales, (num_tokens,), (torch.float32,), device=device)
    check_tensor("weight", weight.values, (None, inner), (FP8,), device=device)
    num_outputs = weight.values.shape[0]
    check_tensor("scales", weight.scales, (num_outputs,), (torch.float32,), device=device)
    require(inner > 0 and inner % 16 == 0, f"{inner} inputs, not a positive multiple of 16")
    require(dtype in ELEMENT_TYPES, f"results of {dtype}")
    if bias is not None:
        check_tensor("bias", bias, (num_outputs,), ELEMENT_TYPES, device=device)
    output = torch.empty((num_tokens, num_outputs), dtype=dtype, device=device)
    if not num_tokens or not num_outputs:
        return output
    tokens = next((size for size in TOKENS if size >= num_tokens), TOKENS[-1])
    splits = num_splits(num_outputs, triton.cdiv(inner, STEP)) if num_tokens <= TOKENS[-1] else 1
    target = output
    if splits > 1:
        target = torch.empty((splits, num_tokens, num_outputs), dtype=torch.float32, device=device)
    _fp8_matmul[(triton.cdiv(num_tokens, tokens) * triton.cdiv(num_outputs, OUTPUTS), splits)](
        rows.values,
        rows.scales,
        weight.values,
        weight.scales,
        None if splits > 1 else bias,
        target,
        num_tokens,
        num_outputs,
        INNER=inner,
        STEP=STEP,
        SPLITS=splits,
        WIDEN=device.type == "cpu",
        OUTPUTS=OUTPUTS,
        TOKENS=tokens,
        **options(tokens),
    )
    if splits > 1:
        add(target, bias, output)
    return output


def options(tokens: int) -> dict[str, int]:
    return {"num_warps": 8 if tokens > 64 else 4, "num_stages": 4}


SPECIALIZATIONS = [
    Specialization(
        "fp8: quantize_rows[4096]",
        _quantize_rows,
        {"rows": "*bf16", "values": "*fp8e4nv", "scales": "*fp32", "row_stride": "i32"},
        {"WIDTH": 4096, "BLOCK": 4096, "LARGEST": FP8_MAX, "ROUNDS": False},
        {"num_warps": 8},
        attributes={"row_stride": 16},
        capabilities=(90, 100),
    ),
    *(
        Specialization(
            f"fp8_matmul[{tokens} tokens]",
            _fp8_matmul,
            {
                "rows": "*fp8e4nv",
                "row_scales": "*fp32",
                "values": "*fp8e4nv",
                "scales": "*fp32",
                "output": "*fp32" if splits > 1 else "*bf16",
                "num_tokens": "i32",
                "num_outputs": "i32",
            },
            {
                "bias": None,
                "INNER": 4096,
                "STEP": STEP,
                "SPLITS": splits,
                "WIDEN": False,
                "OUTPUTS": OUTPUTS,
                "TOKENS": tokens,
            },
            options(tokens),
            MATRIX,
            {"num_outputs": 16},
            capabilities=(90, 100),
        )
        for tokens, splits in ((16, 8), (128, 1))
    ),
]
