"""How the attention kernels are cut."""

import pytest
import torch

from headrace_worker.kernels.attention_arguments import MOST_SHARING
from headrace_worker.kernels.attention_tiles import capability_of, decode_programs, decode_tile, prefill_tile

CAPABILITIES = [0, 80, 86, 89, 90, 100, 120]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_every_gpu_has_room_for_all_heads_that_share_keys(capability: int, is_fp8: bool) -> None:
    for head_dim in (64, 80, 128, 256):
        for group in (1, 7, 16, 17, MOST_SHARING):
            tile = decode_tile(head_dim, group, is_fp8, capability)
            assert group <= tile.rows and tile.rows & (tile.rows - 1) == 0
        assert decode_programs(head_dim, is_fp8) >= 1
        if capability:
            assert prefill_tile(head_dim, is_fp8, capability).rows >= MOST_SHARING


def test_registers_are_limited_only_where_that_is_said() -> None:
    assert "maxnreg" not in prefill_tile(128, False, 90).options
    assert prefill_tile(64, False, 90).options["maxnreg"] == 128


def test_the_interpreter_is_no_gpu() -> None:
    assert capability_of(torch.device("cpu")) == 0
