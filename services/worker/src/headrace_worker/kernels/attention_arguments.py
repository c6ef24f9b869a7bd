"""What both attention kernels take, checked once: shapes, types and how scores are scaled."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace_worker.kernels.attention_math import FP8_FACTOR, LOWEST, padded
from headrace_worker.kernels.checks import check_tensor, require

MOST_SHARING = 64
"""Query heads of one key-value head."""
WIDEST_HEAD = 256
FP8 = torch.float8_e4m3fn


class Arguments(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    is_fp8: bool
    words: Tensor
    """The pages as the kernels read them: 8-bit components in pairs."""
    inner_scale: float
    """What a product of a query and a key is multiplied with, so that weights are powers of 2; with a cap, so that the
    hyperbolic tangent can be taken."""
    outer_scale: float
    """With a cap: what its hyperbolic tangent is multiplied with."""
    is_capped: bool

    @property
    def group(self) -> int:
        """Query heads of one key-value head."""
        return self.num_heads // self.num_kv_heads

    def constants(self, precision: str = "ieee") -> dict[str, Any]:
        num_words = self.head_dim // 2 if self.is_fp8 else self.head_dim
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "WORDS": num_words,
            "BLOCK_WORDS": padded(num_words),
            "BLOCK_SIZE": self.block_size,
            "CAPPED": self.is_capped,
            "FP8": self.is_fp8,
            "ASSEMBLY": self.words.is_cuda,
            "PRECISION": precision,
            "LOWEST": LOWEST,
            "FP8_FACTOR": FP8_FACTOR,
        }


def checked(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    softcap: float | None,
    kv_scales: Tensor | None,
) -> Arguments:
    """ValueError for what the kernels do not take. Reads no content of a tensor."""
    types = (torch.bfloat16, torch.float16) if pages.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    check_tensor("queries", queries, (None, None, None), types, row_stride=True)
    _, num_heads, head_dim = queries.shape
    check_tensor("pages", pages, (None, 2, None, None, head_dim), (queries.dtype, FP8), device=queries.device)
    _, _, num_kv_heads, block_size, _ = pages.shape
    check_tensor("block_table", block_table, (None, None), (torch.int32,), device=queries.device, row_stride=True)
    is_fp8 = pages.dtype == FP8
    require(
        num_heads % num_kv_heads == 0 and num_heads // num_kv_heads <= MOST_SHARING,
        f"{num_heads} heads cannot share {num_kv_heads} key-value heads",
    )
    require(
        head_dim % 8 == 0 and head_dim <= WIDEST_HEAD, f"head_dim {head_dim} is not a multiple of 8 up to {WIDEST_HEAD}"
    )
    require(math.isfinite(scale) and scale > 0, f"scale {scale} is not positive")
    require(softcap is None or (math.isfinite(softcap) and softcap > 0), f"softcap {softcap} is not positive")
    require((kv_scales is not None) == is_fp8, "8-bit keys and values need scales, and only they")
    if kv_scales is not None:
        check_tensor("kv_scales", kv_scales, (2, num_kv_heads), (torch.float32,), device=queries.device)
    log2e = math.log2(math.e)
    return Arguments(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        is_fp8=is_fp8,
        words=pages.view(torch.int16) if is_fp8 else pages,
        inner_scale=scale * log2e if softcap is None else scale / softcap,
        outer_scale=0.0 if softcap is None else softcap * log2e,
        is_capped=softcap is not None,
    )
