"""Whole blocks of the paged cache copied in all layers by one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_worker.kernels.checks import check_tensor, require
from headrace_worker.kernels.jit import jit
from headrace_worker.kernels.specialization import Specialization

WORDS = 4096
"""Of 4 bytes, in a program."""


# Caches of any size share one binary: the first copy of a request must not wait for a compiler.
@jit(do_not_specialize=("num_blocks",))
def _copy(pages, sources, destinations, num_blocks, block_words, WORDS: tl.constexpr):
    source = tl.load(sources + tl.program_id(1))
    destination = tl.load(destinations + tl.program_id(1))
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    layer = pages + tl.program_id(2).to(tl.int64) * num_blocks * block_words
    inside = words < block_words
    copied = tl.load(layer + source * block_words + words, mask=inside)
    tl.store(layer + destination * block_words + words, copied, mask=inside)


def copy_blocks(pages: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """pages [layers, blocks, …]; sources and destinations int64 [copies]. No destination may be another's source,
    or be named twice with different sources: copies run in any order. ValueError for what the kernel does not take."""
    require(pages.dim() > 2 and pages.is_contiguous(), "pages are not contiguous [layers, blocks, ...]")
    check_tensor("sources", sources, (None,), (torch.int64,), device=pages.device)
    check_tensor("destinations", destinations, tuple(sources.shape), (torch.int64,), device=pages.device)
    num_layers, num_blocks = pages.shape[:2]
    block_bytes = pages[0, 0].numel() * pages.element_size()
    require(block_bytes % 4 == 0, f"blocks of {block_bytes} bytes are not whole words")
    if not sources.shape[0]:
        return
    block_words = block_bytes // 4
    _copy[(triton.cdiv(block_words, WORDS), sources.shape[0], num_layers)](
        pages.view(num_layers, num_blocks, -1).view(torch.int32),
        sources,
        destinations,
        num_blocks,
        block_words,
        WORDS=WORDS,
        num_warps=8,
    )


SPECIALIZATIONS = [
    Specialization(
        "copy_blocks",
        _copy,
        {
            "pages": "*i32",
            "sources": "*i64",
            "destinations": "*i64",
            "num_blocks": "i32",
            "block_words": "i32",
        },
        {"WORDS": WORDS},
        {"num_warps": 8},
        attributes={"block_words": 16},
    )
]
