"""Copying blocks."""

import pytest
import torch

from headrace_worker.kernels import attention_reference
from headrace_worker.kernels.block_copy import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_whole_blocks_are_copied_in_every_layer(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 7, 2, 2, 8, 80)
    pages = torch.randint(0, 120, (*shape[:-1], 80 * dtype.itemsize), dtype=torch.uint8, generator=generator)
    pages = pages.to(device).view(dtype)
    expected = pages.clone()
    sources = torch.tensor([1, 1, 6], device=device)
    destinations = torch.tensor([4, 0, 2], device=device)
    copy_blocks(pages, sources, destinations)
    attention_reference.copy_blocks(expected.view(torch.uint8), sources, destinations)
    assert torch.equal(pages.view(torch.uint8), expected.view(torch.uint8))


def test_nothing_else_is_taken(device: torch.device) -> None:
    pages = torch.zeros((2, 4, 2, 1, 4, 8), device=device)
    blocks = torch.tensor([1], device=device)
    copy_blocks(pages, blocks[:0], blocks[:0])
    for arguments in (
        (pages.transpose(0, 1), blocks, blocks),
        (pages, blocks.int(), blocks),
        (pages, blocks, torch.tensor([1, 2], device=device)),
        (pages[..., :1].to(torch.uint8).contiguous()[:, :, :1, :, :1], blocks, blocks),
    ):
        with pytest.raises(ValueError):
            copy_blocks(*arguments)
