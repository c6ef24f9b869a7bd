"""Matrix products with weights of 8 or 4 bits and activations of 16: weights widen on the way to the matrix unit.

The weight is the left operand, from registers, so its rows fill the matrix instruction's long side even when there are
few tokens. Its integers are exact in 16 bits; scales multiply the sums, in float32. Where there are few tokens, the
inner dimension is cut among programs and the parts are added in order. How many tokens there are decides the tile, so
this is not for the deterministic mode.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.matmul import MATRIX, add, tile_at
from headrace_worker.kernels.quantized_weights import IntWeight
from headrace_worker.kernels.specialization import Specialization

ACTIVATION_TYPES = (torch.bfloat16, torch.float16)
OUTPUTS = 128
"""Of a tile."""
TOKENS = (16, 32, 64, 128)
"""Of a tile: the smallest that takes all tokens, or the last."""
MOST_SPLITS = 8
WANTED_TILES = 256
"""About two a multiprocessor of a large GPU. A constant, so that machines agree on what is added to what."""


@jit(do_not_specialize=("num_tokens",))
def _int_matmul(
    rows,
    values,
    scales,
    zeros,
    bias,
    output,
    num_tokens,
    num_outputs,
    row_stride,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
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
    real_token = token < num_tokens
    real_output = column < num_outputs
    row_places = rows + token.to(tl.int64)[None, :] * row_stride
    group_places = column.to(tl.int64) * (INNER // GROUP)
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    STEPS: tl.constexpr = INNER // STEP
    for step in range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS):
        start = step * STEP
        if BITS == 8:
            depth = tl.arange(0, STEP)
            places = values + column.to(tl.int64)[:, None] * INNER + (start + depth)[None, :]
            w = tl.load(places, mask=real_output[:, None], other=0)
            x = tl.load(row_places + (start + depth)[:, None], mask=real_token[None, :], other=0.0)
            if WIDEN:  # the interpreter cannot multiply bfloat16
                part = tl.dot(w.to(tl.float32), x.to(tl.float32))
            else:
                part = tl.dot(w.to(rows.dtype.element_ty), x)
        else:
            half = tl.arange(0, STEP // 2)
            places = values + column.to(tl.int64)[:, None] * (INNER // 2) + (start // 2 + half)[None, :]
            packed = tl.load(places, mask=real_output[:, None], other=0)
            zero = tl.load(zeros + group_places + start // GROUP, mask=real_output, other=0).to(tl.float32)
            low = ((packed & 15).to(tl.float32) - zero[:, None]).to(rows.dtype.element_ty)
            high = ((packed >> 4).to(tl.float32) - zero[:, None]).to(rows.dtype.element_ty)
            x_low = tl.load(row_places + (start + half)[:, None], mask=real_token[None, :], other=0.0)
            upper_places = row_places + (start + STEP // 2 + half)[:, None]
            x_high = tl.load(upper_places, mask=real_token[None, :], other=0.0)
            if WIDEN:
                low = low.to(tl.float32)
                high = high.to(tl.float32)
                x_low = x_low.to(tl.float32)
                x_high = x_high.to(tl.float32)
            part = tl.dot(high, x_high, tl.dot(low, x_low))
        scale = tl.load(scales + group_places + start // GROUP, mask=real_output, other=0.0)
        total += part * scale[:, None]
    places = token.to(tl.int64)[None, :] * num_outputs + column[:, None]
    if SPLITS > 1:
        places += split.to(tl.int64) * num_tokens * num_outputs
    elif bias is not None:
        total += tl.load(bias + column, mask=real_output, other=0.0).to(tl.float32)[:, None]
    tl.store(output + places, total.to(output.dtype.element_ty), mask=real_output[:, None] & real_token[None, :])


def int_matmul(rows: Tensor, weight: IntWeight, bias: Tensor | None = None) -> Tensor:
    """rows [rows, inputs] bfloat16 or float16, may lie apart -> [rows, outputs], added up in float32.

    The weight's groups are of 32, 64, 128 or, in 8 bits, any multiple of 32 (such as all inputs). ValueError for what
    the kernel does not take.
    """
    check_tensor("rows", rows, (None, None), ACTIVATION_TYPES, row_stride=True)
    num_tokens, inner = rows.shape
    group, device = weight.group, rows.device
    require(group > 0 and group % 32 == 0 and inner % group == 0, f"groups of {group} among {inner} inputs")
    num_outputs = weight.values.shape[0]
    check_tensor("scales", weight.scales, (num_outputs, inner // group), (torch.float32,), device=device)
    if weight.bits == 8:
        check_tensor("values", weight.values, (num_outputs, inner), (torch.int8,), device=device)
    else:
        require(group in (32, 64, 128), f"groups of {group} in 4 bits, not of 32, 64 or 128")
        check_tensor("values", weight.values, (num_outputs, inner // 2), (torch.uint8,), device=device)
        require(weight.zeros is not None, "4 bits without zero points")
    if weight.zeros is not None:
        check_tensor("zeros", weight.zeros, weight.scales.shape, (torch.uint8,), device=device)
    if bias is not None:
        check_tensor("bias", bias, (num_outputs,), (*ACTIVATION_TYPES, torch.float32), device=device)
    output = torch.empty((num_tokens, num_outputs), dtype=rows.dtype, device=device)
    if not num_tokens or not num_outputs:
        return output
    tokens = next((size for size in TOKENS if size >= num_tokens), TOKENS[-1])
    step = step_of(group, weight.bits, tokens)
    splits = num_splits(num_outputs, inner // step) if num_tokens <= TOKENS[-1] else 1
    target = output
    if splits > 1:
        target = torch.empty((splits, num_tokens, num_outputs), dtype=torch.float32, device=device)
    _int_matmul[(triton.cdiv(num_tokens, tokens) * triton.cdiv(num_outputs, OUTPUTS), splits)](
        rows,
        weight.values,
        weight.scales,
        weight.zeros,
        None if splits > 1 else bias,
        target,
        num_tokens,
        num_outputs,
        rows.stride(0),
        INNER=inner,
        GROUP=group,
        STEP=step,
        BITS=weight.bits,
        SPLITS=splits,
        WIDEN=device.type == "cpu",
        OUTPUTS=OUTPUTS,
        TOKENS=tokens,
        **options(tokens),
    )
    if splits > 1:
        add(target, bias, output)
    return output


def step_of(group: int, bits: int, tokens: int) -> int:
    """Inputs that a program takes at once: in 4 bits a group; in 8 bits what of one the registers hold."""
    sizes = (64, 32) if bits == 8 and tokens > 64 else (128, 64, 32)
    return next(size for size in sizes if group % size == 0)


def num_splits(num_outputs: int, steps: int) -> int:
    """Enough programs for the GPU, each with four steps at least."""
    splits = 1
    while splits < MOST_SPLITS and triton.cdiv(num_outputs, OUTPUTS) * splits < WANTED_TILES and steps >= 8 * splits:
        splits *= 2
    return splits


def options(tokens: int) -> dict[str, int]:
    return {"num_warps": 8 if tokens > 32 else 4, "num_stages": 4 if tokens <= 32 else 3}


SPECIALIZATIONS = [
    Specialization(
        f"int{bits}_matmul[{tokens} tokens, groups of {group}]",
        _int_matmul,
        {
            "rows": "*bf16",
            "values": "*i8" if bits == 8 else "*u8",
            "scales": "*fp32",
            "output": "*fp32" if splits > 1 else "*bf16",
            "num_tokens": "i32",
            "num_outputs": "i32",
            "row_stride": "i32",
            **({"zeros": "*u8"} if bits == 4 else {}),
        },
        {
            "bias": None,
            "INNER": 4096,
            "GROUP": group,
            "STEP": step_of(group, bits, tokens),
            "BITS": bits,
            "SPLITS": splits,
            "WIDEN": False,
            "OUTPUTS": OUTPUTS,
            "TOKENS": tokens,
            **({"zeros": None} if bits == 8 else {}),
        },
        options(tokens),
        MATRIX,
        {"num_outputs": 16, "row_stride": 16},
    )
    for bits, tokens, group, splits in (
        (8, 16, 4096, 8),
        (8, 128, 4096, 1),
        (4, 16, 128, 8),
        (4, 16, 32, 8),
        (4, 64, 128, 8),
        (4, 128, 128, 1),
    )
]
