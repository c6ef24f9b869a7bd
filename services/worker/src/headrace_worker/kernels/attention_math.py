"""What the attention kernels share: scores, and 8-bit keys and values.

An e4m3 number (Micikevicius et al., "FP8 formats for deep learning", 2022) moved up by seven bits is a float16 of 2^-8
its value, subnormals included: reading it takes two shifts, on every GPU. Two neighbouring components travel as one
16-bit word, so that what is loaded in 16-bit words can be transposed on its way out of shared memory; the components at
even and at odd places are then multiplied apart. A NaN is read as 480: whoever wrote it has it in its residual stream.
"""

import triton
import triton.language as tl

from headrace_worker.kernels.jit import jit

FP8_FACTOR = 256.0
LOWEST = -1.0e30
"""A running maximum before any score. Finite, so that the difference of two is a number."""


@jit
def components(words, ASSEMBLY: tl.constexpr):
    """int16 words of two e4m3 numbers -> the lower and the higher ones as float16, times 2^-8."""
    if ASSEMBLY:
        # Two words at once, in registers as matrix instructions want them; compiled word by word it is twice as long.
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 number, sign;
            shl.b32 number, $2, 7;
            and.b32 number, number, 0x3f803f80;
            shl.b32 sign, $2, 8;
            and.b32 sign, sign, 0x80008000;
            or.b32 $0, number, sign;
            shr.b32 number, $2, 1;
            and.b32 number, number, 0x3f803f80;
            and.b32 sign, $2, 0x80008000;
            or.b32 $1, number, sign;
            }
            """,
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = (((words & 0x7F) << 7) | ((words & 0x80) << 8)).to(tl.float16, bitcast=True)
        odd = (((words >> 1) & 0x3F80) | (words & -0x8000)).to(tl.float16, bitcast=True)
    return even, odd


@jit
def capped(scores, inner_scale):
    """tanh(scores * inner_scale)"""
    return 2.0 * tl.sigmoid(2.0 * inner_scale * scores) - 1.0


def padded(size: int) -> int:
    """The power of two that a dimension is masked up to; matrix instructions want 16 at least."""
    return max(16, int(triton.next_power_of_2(size)))
