"""What happens to rows between the large operations: RMSNorm with its residual, and the gated activations."""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.specialization import Specialization

ELEMENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_ROW = 32768
"""A program holds a whole row in its registers."""
ACT_BLOCK = 1024

Activation = Literal["silu", "gelu_tanh"]


@jit
def _rms_norm(rows, residual, weight, output, epsilon, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        places = residual + row * WIDTH + columns
        total = values + tl.load(places, mask=inside, other=0.0).to(tl.float32)
        # What is normalized is what is kept, rounding included.
        rounded = total.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + epsilon)
    values = values * scale
    if weight is not None:
        values = values * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * WIDTH + columns, values.to(output.dtype.element_ty), mask=inside)


@jit
def _act_mul(gate_up, output, width, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    places = gate_up + row * row_stride + columns
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + width, mask=inside, other=0.0).to(tl.float32)
    # 0.5 (1 + tanh(x)) is the sigmoid of 2 x, so the two activations differ in its argument only.
    argument = gate
    if GELU:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(
        output + row * width + columns, (gate * tl.sigmoid(argument) * up).to(output.dtype.element_ty), mask=inside
    )


def rms_norm(rows: Tensor, weight: Tensor | None, *, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) in float32: [rows, size] -> [rows, size], contiguous; rows may lie apart.

    weight: [size], of any float type, or None; Gemma's is handed in with its 1 added. With `residual` (like rows,
    contiguous), adds rows to it in place and normalizes the sum. ValueError for what the kernel does not take.
    """
    check_tensor("rows", rows, (None, None), ELEMENT_TYPES, row_stride=True)
    num_rows, width = rows.shape
    require(0 < width <= WIDEST_ROW, f"rows of {width} elements, not 1 to {WIDEST_ROW}")
    if weight is not None:
        check_tensor("weight", weight, (width,), ELEMENT_TYPES, device=rows.device)
    if residual is not None:
        check_tensor("residual", residual, rows.shape, (rows.dtype,), device=rows.device)
    output = torch.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _rms_norm[(num_rows,)](
            rows,
            residual,
            weight,
            output,
            epsilon,
            rows.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return output


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [rows, 2 * size] -> activation(gate) * up [rows, size], in float32; the gate is the first half. gelu_tanh
    is GELU's tanh approximation (Hendrycks and Gimpel, 2016). ValueError for what the kernel does not take."""
    check_tensor("gate_up", gate_up, (None, None), ELEMENT_TYPES, row_stride=True)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    require(gate_up.shape[1] % 2 == 0 and width > 0, f"the width is {gate_up.shape[1]}, not even and positive")
    require(activation in ("silu", "gelu_tanh"), f"no activation {activation}")
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _act_mul[(num_rows, triton.cdiv(width, ACT_BLOCK))](
            gate_up, output, width, gate_up.stride(0), GELU=activation == "gelu_tanh", BLOCK=ACT_BLOCK, num_warps=4
        )
    return output


def _num_warps(block: int) -> int:
    """16 elements a thread, within what a program can have."""
    return max(1, min(16, block // 512))


SPECIALIZATIONS = [
    *(
        Specialization(
            f"rms_norm[{width}{', residual' if residual else ''}]",
            _rms_norm,
            {
                "rows": "*bf16",
                "weight": "*fp32",
                "output": "*bf16",
                "epsilon": "fp32",
                "row_stride": "i32",
                **({"residual": "*bf16"} if residual else {}),
            },
            {
                "WIDTH": width,
                "BLOCK": triton.next_power_of_2(width),
                **({} if residual else {"residual": None}),
            },
            {"num_warps": _num_warps(triton.next_power_of_2(width))},
            attributes={"row_stride": 16},
        )
        for width, residual in ((576, False), (8192, True))
    ),
    *(
        Specialization(
            f"act_mul[{'gelu_tanh' if gelu else 'silu'}]",
            _act_mul,
            {"gate_up": "*bf16", "output": "*bf16", "width": "i32", "row_stride": "i32"},
            {"GELU": gelu, "BLOCK": ACT_BLOCK},
            {"num_warps": 4},
            attributes={"width": 16, "row_stride": 16},
        )
        for gelu in (False, True)
    ),
]
